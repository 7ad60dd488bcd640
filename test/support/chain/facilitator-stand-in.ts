// A stand-in for a facilitator, not the real one: an https server on loopback that answers `/settle` as a test says,
// to try the gateway with every answer that any facilitator could give.
import { randomBytes } from "node:crypto";
import { SERVER, TEST_CA } from "../http/certificates.ts";

export interface SettleCall {
  readonly path: string;
  readonly headers: Headers;
  readonly text: string;
  // biome-ignore lint/suspicious/noExplicitAny: tests look into the request field by field.
  readonly body: any;
}

type Answer = (call: SettleCall) => Response | Promise<Response>;

export interface FacilitatorStandIn {
  readonly url: string;
  /** Every request so far. */
  readonly calls: SettleCall[];
  /** The calls with this payment's nonce. */
  of(nonce: string): SettleCall[];
  /** How the payment with this nonce is answered from now on. */
  answer(nonce: string, answer: Answer): void;
  /** Resolves when the payment with this nonce has come for the `count`th time. */
  arrival(nonce: string, count?: number): Promise<SettleCall>;
  stop(): Promise<void>;
}

export const randomHash = () => `0x${randomBytes(32).toString("hex")}`;

/** The answer to a payment that was collected. */
export function collected(call: SettleCall, fields: object = {}): Response {
  const { authorization } = call.body.paymentPayload.payload;
  return Response.json({
    success: true,
    transaction: randomHash(),
    network: "base",
    payer: authorization.from,
    ...fields,
  });
}

export function notCollected(fields: object = {}): Response {
  return Response.json({
    success: false,
    errorReason: "payment could not be collected",
    transaction: "",
    network: "base",
    payer: "",
    ...fields,
  });
}

/** @param mutual whether it takes only clients with a certificate of the test CA */
export function startFacilitatorStandIn({ mutual = false } = {}): FacilitatorStandIn {
  const calls: SettleCall[] = [];
  const answers = new Map<string, Answer>();
  const told = new Set<() => void>();
  const nonceOf = ({ body }: SettleCall) => String(body?.paymentPayload?.payload?.authorization?.nonce);
  const server = Bun.serve({
    hostname: "127.0.0.1",
    port: 0,
    idleTimeout: 0,
    tls: {
      ...SERVER,
      ...(mutual && { ca: TEST_CA, requestCert: true, rejectUnauthorized: true }),
    },
    async fetch(request) {
      const text = await request.text();
      const call = {
        path: new URL(request.url).pathname,
        headers: request.headers,
        text,
        body: JSON.parse(text),
      };
      calls.push(call);
      for (const tell of told) tell();
      return (answers.get(nonceOf(call)) ?? collected)(call);
    },
  });
  const of = (nonce: string) => calls.filter((call) => nonceOf(call) === nonce.toLowerCase());
  return {
    url: `https://127.0.0.1:${server.port}`,
    calls,
    of,
    answer: (nonce, answer) => void answers.set(nonce.toLowerCase(), answer),
    arrival(nonce, count = 1) {
      const { promise, resolve } = Promise.withResolvers<SettleCall>();
      const look = () => {
        const call = of(nonce)[count - 1];
        if (call !== undefined) resolve(call);
      };
      told.add(look);
      look();
      return promise.finally(() => told.delete(look));
    },
    stop: () => server.stop(true),
  };
}
