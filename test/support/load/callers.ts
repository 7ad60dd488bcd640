// Callers of several gateways that share a database, who go on whatever becomes of these, and keep book of what they
// were told. A call that may be sent again (it has an idempotency key, or a payment) is sent until it is accepted.
import type { Hex } from "viem";
import type { SignedPayment } from "../chain/payments.ts";

/** A gateway says what it can within ten seconds. */
const ANSWER_MS_MAX = 12_000;
const AGAIN_MS = 150;

/** One call as its caller sees it. */
export interface Call {
  readonly n: number;
  readonly agent: string;
  readonly kind: Kind;
  readonly nonce: Hex | null;
  /** Of each try: the status, or 0 where there was no answer. */
  readonly statuses: number[];
  /** By performance.now(). */
  readonly sentAt: number;
  answeredAt: number;
  /** Null until it is accepted. */
  invocation: string | null;
}

export type Kind = "free" | "keyed" | "limited" | "streamed" | "paid";

/** What a caller does once. */
export interface Request {
  readonly kind: Kind;
  readonly agent: string;
  readonly payment?: SignedPayment;
}

interface CallersOptions {
  /** Where calls go, one after the other. */
  readonly gateways: readonly { readonly url: string }[];
  /** Of the caller. */
  readonly headers: Readonly<Record<string, string>>;
  /** Several groups of callers of one upstream begin with different ones. */
  readonly firstNumber?: number;
}

export type Callers = ReturnType<typeof createCallers>;

export function createCallers({ gateways, headers, firstNumber = 0 }: CallersOptions) {
  const calls: Call[] = [];
  const loops: Promise<void>[] = [];
  let isStopped = false;
  let turn = 0;
  const watches = new Set<() => void>();

  /** One try at the next gateway; gives the status and the invocation. */
  async function attempt({ n, agent, kind }: Call, more: Readonly<Record<string, string>>) {
    const { url } = gateways[turn++ % gateways.length]!;
    const path = `${url}/v1/proxy/${agent}${kind === "streamed" ? "/stream" : ""}`;
    try {
      // A connection of its own: the runtime would send a request anew whose kept connection was cut.
      const answer = await fetch(path, {
        method: "POST",
        headers: { ...headers, ...more },
        body: JSON.stringify({ n }),
        signal: AbortSignal.timeout(ANSWER_MS_MAX),
        keepalive: false,
      });
      const invocation = answer.ok ? answer.headers.get("x-service-invocation-id") : null;
      // Streams may be cut when their gateway dies.
      await answer.text().catch(() => "");
      return { status: answer.status, invocation };
    } catch {
      return { status: 0, invocation: null };
    }
  }

  /** Sends it once, or for as long as it may be sent again. */
  async function send({ kind, agent, payment }: Request): Promise<Call> {
    const call: Call = {
      n: firstNumber + calls.length,
      agent,
      kind,
      nonce: payment?.authorization.nonce ?? null,
      statuses: [],
      sentAt: performance.now(),
      answeredAt: Number.POSITIVE_INFINITY,
      invocation: null,
    };
    calls.push(call);
    const more = { ...payment?.headers, ...(kind === "keyed" && { "idempotency-key": `key-${call.n}` }) };
    const mayRepeat = kind === "keyed" || kind === "paid";
    for (;;) {
      const { status, invocation } = await attempt(call, more);
      call.statuses.push(status);
      call.answeredAt = performance.now();
      call.invocation = invocation;
      for (const look of watches) look();
      // What is refused for good (a payment that has run out) can't be accepted any more.
      if (!mayRepeat || invocation !== null || [400, 402, 409].includes(status)) return call;
      await Bun.sleep(AGAIN_MS);
    }
  }

  return {
    calls: calls as readonly Call[],
    send,
    /** Sends one request after the other until `stop`. */
    keepSending(next: () => Request | Promise<Request>, pauseMs: number): void {
      const run = async () => {
        while (!isStopped) {
          await send(await next());
          await Bun.sleep(pauseMs);
        }
      };
      loops.push(run());
    },
    /** Resolves when so many more calls have been accepted. */
    accepted(more: number, fits: (call: Call) => boolean = () => true): Promise<void> {
      const count = () => calls.filter((call) => call.invocation !== null && fits(call)).length;
      const enough = count() + more;
      const { promise, resolve } = Promise.withResolvers<void>();
      const look = () => {
        if (count() < enough) return;
        watches.delete(look);
        resolve();
      };
      watches.add(look);
      return promise;
    },
    /** No new calls; resolves when those under way have their last answer. */
    async stop(): Promise<void> {
      isStopped = true;
      await Promise.all(loops);
    },
  };
}
