// The mutual-TLS port with accounts in a real store and a settling that only notes what it is asked, and raw
// clients to try it with.

import { connect as connectTcp, type Socket } from "node:net";
import { type ConnectionOptions, connect, type TLSSocket } from "node:tls";
import type { Log, LogFields } from "../../../src/core/log.ts";
import { silentMeters } from "../../../src/core/meters.ts";
import { accountOf, addAccount } from "../../../src/facilitator/accounts.ts";
import { LISTENER_LIMITS, type ListenerLimits, listenMutualTls } from "../../../src/facilitator/mtls.ts";
import { createPeerEdge, x402V1 } from "../../../src/facilitator/routes.ts";
import { type CollectionOutcome, settledBy } from "../../../src/facilitator/settle/outcome.ts";
import { MAX } from "../../../src/kernel/limits.ts";
import { BASE } from "../network.ts";
import { sqlitePlace } from "../stores/stores.ts";
import { makePki, type TestIdentity } from "./pki.ts";

export const JSON_HEADERS = { "content-type": "application/json" };

const PAYER = `0x${"11".repeat(20)}` as const;

const HASH = `0x${"ab".repeat(32)}` as const;
export const SETTLEMENT = settledBy(HASH);

/** As the settlement is answered. */
export const SETTLED = {
  success: true,
  transaction: HASH,
  network: "base",
  payer: PAYER,
};

/** The body of a good request, and the fields that a test wants otherwise. */
export function settleBody(changes: Record<string, unknown> = {}): string {
  const address = `0x${"22".repeat(20)}`;
  return JSON.stringify({
    x402Version: 1,
    paymentPayload: {
      x402Version: 1,
      scheme: "exact",
      network: "base",
      payload: {
        signature: `0x${"33".repeat(65)}`,
        authorization: {
          from: PAYER,
          to: address,
          value: "1000",
          validAfter: "0",
          validBefore: "4000000000",
          nonce: `0x${"44".repeat(32)}`,
        },
      },
    },
    paymentRequirements: {
      scheme: "exact",
      network: "base",
      maxAmountRequired: "1000",
      asset: "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
      payTo: address,
      resource: "http://localhost/v1/proxy/agt_1",
      maxTimeoutSeconds: 60,
    },
    ...changes,
  });
}

export function head(method: string, path: string, headers: Record<string, string | number> = {}): string {
  const lines = Object.entries(headers).map(([name, value]) => `${name}: ${value}\r\n`);
  return `${method} ${path} HTTP/1.1\r\nhost: localhost\r\n${lines.join("")}\r\n`;
}

/** A whole `/settle` request. */
export function settleRequest(body = settleBody(), headers: Record<string, string> = {}): string {
  const length = Buffer.byteLength(body);
  return head("POST", "/settle", { "content-type": "application/json", "content-length": length, ...headers }) + body;
}

export const until = async (holds: () => boolean) => {
  while (!holds()) await new Promise((resolve) => setImmediate(resolve));
};

/** The milliseconds that something takes. */
export const elapsed = async (promise: Promise<unknown>) => {
  const from = performance.now();
  await promise;
  return performance.now() - from;
};

export type Port = Awaited<ReturnType<typeof startPort>>;

/** @param answer in place of the facilitator's own */
export async function startPort(limits: Partial<ListenerLimits> = {}, answer?: () => Promise<Response>) {
  const pki = await makePki();
  const place = sqlitePlace();
  const store = await place.open();
  const clock = { shift: 0, now: () => Date.now() + clock.shift };
  const lines: LogFields[] = [];
  const note = (event: string, fields: LogFields = {}) => void lines.push({ event, ...fields });
  const log: Log = { debug: note, info: note, warn: note, error: note };
  const answers = { settle: async (): Promise<CollectionOutcome> => SETTLEMENT, ready: true };
  const asked: string[] = [];
  const edge = createPeerEdge({
    protocol: x402V1(BASE),
    read: store.read,
    log,
    meters: silentMeters,
    tracer: null,
    settle(account) {
      asked.push(account.name);
      return answers.settle();
    },
    finalAfterSeconds: 24,
    readiness: async () => (answers.ready ? { ready: true } : { ready: false, reason: "gas wallet low" }),
  });
  const listener = await listenMutualTls({
    host: "127.0.0.1",
    port: 0,
    tls: { cert: pki.server.cert, key: pki.server.key, clientCa: pki.ca.cert },
    answer: answer ?? edge.fetch,
    ownerOf: async (fingerprint) => (await accountOf(store.read, fingerprint))?.name ?? null,
    bodyBytesMax: MAX.settleBodyBytes,
    limits: { ...LISTENER_LIMITS, ...limits },
    clock,
    log,
  });
  const { port } = listener;
  const fetchAs = (path: string, identity: TestIdentity, init: RequestInit = {}) =>
    fetch(`https://127.0.0.1:${port}${path}`, {
      ...init,
      tls: { cert: identity.cert, key: identity.key, ca: pki.ca.cert },
    });
  const limitsOfNone = { maxPerTransaction: null, dailyCeiling: null };
  await addAccount(store, clock, { name: "acme", certificate: pki.client.cert, ...limitsOfNone });

  return {
    pki,
    place,
    store,
    clock,
    lines,
    edge,
    listener,
    port,
    answers,
    /** The accounts of the settlements that were asked for. */
    asked,
    url: `https://127.0.0.1:${port}`,
    fetch: fetchAs,
    settle: (identity: TestIdentity, body = settleBody(), headers: Record<string, string> = JSON_HEADERS) =>
      fetchAs("/settle", identity, { method: "POST", body, headers }),
    dial: (identity: TestIdentity | null, options: ConnectionOptions = {}) =>
      dial({
        port,
        host: "127.0.0.1",
        ca: pki.ca.cert,
        ALPNProtocols: ["http/1.1"],
        ...(identity === null ? {} : { cert: identity.cert, key: identity.key }),
        ...options,
      }),
    dialPlain: () => listenTo(connectTcp(port, "127.0.0.1")),
    async stop() {
      await listener.stop();
      await store.close();
      place.remove();
    },
  };
}

export interface Client<S extends Socket = Socket> {
  readonly socket: S;
  /** Everything that has come so far. */
  received(): string;
  /** Resolves with everything when so many answers have come, or the connection is closed. */
  answers(count: number): Promise<string>;
  /** Milliseconds from now to the end of the connection. */
  closed: Promise<void>;
  destroy(): void;
}

function dial(options: ConnectionOptions): Client<TLSSocket> {
  return listenTo(connect(options));
}

function listenTo<S extends Socket>(socket: S): Client<S> {
  let text = "";
  let wake = () => {};
  let isClosed = false;
  const { promise: closed, resolve } = Promise.withResolvers<void>();
  socket.on("data", (bytes: Uint8Array) => {
    text += Buffer.from(bytes).toString("latin1");
    wake();
  });
  // The server ends it: with a reset when it still had something to read.
  socket.on("error", () => {});
  socket.on("close", () => {
    isClosed = true;
    resolve();
    wake();
  });
  return {
    socket,
    closed,
    received: () => text,
    async answers(count) {
      const arrived = () => text.split("HTTP/1.1 ").length - 1 >= count && /\r\n\r\n/.test(text);
      while (!isClosed && !arrived()) {
        await new Promise<void>((resolve) => {
          wake = resolve;
        });
      }
      return text;
    },
    destroy: () => socket.destroy(),
  };
}
