// A relay before a node's JSON-RPC that does what nodes and the way to them do wrong, call by call: it refuses,
// breaks off, falls silent, answers nonsense, or lies behind; before the node gets the call or after. The node
// itself is real and stays as it is.
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import type { Socket } from "node:net";

/**
 * What happens to a call. `after` means that the node gets the call first, so that a transaction is accepted whose
 * sender hears of an error. In a batch, `break`, `hang`, `page` and `garbage` hit the answer to the whole batch.
 */
export type RpcFault =
  /** Goes through: to let some calls pass before a fault. */
  | { readonly kind: "pass" }
  /** A JSON-RPC error. */
  | { readonly kind: "error"; readonly after?: boolean; readonly code?: number; readonly message?: string }
  /** The connection ends without an answer. */
  | { readonly kind: "break"; readonly after?: boolean }
  /** No answer, until the caller gives up or the relay stops. */
  | { readonly kind: "hang"; readonly after?: boolean }
  /** A page of HTML with this status, as proxies make them. */
  | { readonly kind: "page"; readonly after?: boolean; readonly status: number }
  /** Status 200 with this text instead of a JSON-RPC answer. */
  | { readonly kind: "garbage"; readonly after?: boolean; readonly text: string }
  /** This result, without asking the node. */
  | { readonly kind: "result"; readonly result: unknown }
  /** A fault that hangs on what was asked. */
  | { readonly kind: "choose"; choose(params: readonly unknown[]): Exclude<RpcFault, { kind: "choose" }> }
  /** Another result made of the node's own. */
  | { readonly kind: "rewrite"; rewrite(result: unknown, params: readonly unknown[]): unknown };

interface RpcCall {
  readonly id?: unknown;
  readonly method: string;
  readonly params?: readonly unknown[];
}

interface RpcAnswer {
  readonly jsonrpc: "2.0";
  readonly id: unknown;
  readonly result?: unknown;
  readonly error?: { readonly code: number; readonly message: string };
}

/** What takes the place of the whole HTTP answer. */
type Instead = Extract<RpcFault, { kind: "break" | "hang" | "page" | "garbage" }>;

export interface RpcRelay {
  readonly url: string;
  /**
   * From now on, calls of this method (`*`: of any method without faults of its own) meet this fault, so many times.
   * Faults for one method follow each other in the order in which they were set.
   */
  on(method: string, fault: RpcFault, times?: number): void;
  /** Forgets the faults of one method, or all, and the delay behind the chain as well, or that it stands still. */
  heal(method?: string): void;
  /** Answers as a node would that has not heard of the newest blocks. */
  behind(blocks: number): void;
  /** Answers as a node would whose newest block is this for ever. */
  standStill(number: number): void;
  /** How often the method was called. */
  count(method: string): number;
  /** The parameters of every call of the method, oldest first. */
  params(method: string): readonly (readonly unknown[])[];
  /** Resolves when the method has been called so often, counted from the start. */
  called(method: string, times?: number): Promise<void>;
  /** Resolves when the node has got and answered that many calls of the method. */
  passed(method: string, times?: number): Promise<void>;
  /** Cuts every connection and listens no more, until `restore`. */
  refuse(): Promise<void>;
  restore(): Promise<void>;
  stop(): Promise<void>;
}

export async function startRpcRelay(targetUrl: string): Promise<RpcRelay> {
  const faults = new Map<string, { fault: RpcFault; left: number }[]>();
  const arrivals = counter();
  const passages = counter();
  const recorded = new Map<string, (readonly unknown[])[]>();
  let newestOf: ((head: number) => number) | null = null;

  const nextFault = (method: string): RpcFault => {
    for (const name of [method, "*"]) {
      const rule = faults.get(name)?.find(({ left }) => left > 0);
      if (rule === undefined) continue;
      rule.left--;
      return rule.fault;
    }
    return { kind: "pass" };
  };

  const ask = async (call: RpcCall): Promise<RpcAnswer> => {
    const answer = await (newestOf === null ? askNode(targetUrl, call) : askBehind(targetUrl, call, newestOf));
    passages.count(call.method);
    return answer;
  };

  const answerCall = async (call: RpcCall): Promise<RpcAnswer | { instead: Instead }> => {
    const params = call.params ?? [];
    recorded.set(call.method, [...(recorded.get(call.method) ?? []), params]);
    const found = nextFault(call.method);
    const fault = found.kind === "choose" ? found.choose(params) : found;
    arrivals.count(call.method);
    const head = { jsonrpc: "2.0", id: call.id ?? null } as const;
    switch (fault.kind) {
      case "pass":
        return ask(call);
      case "result":
        return { ...head, result: fault.result };
      case "rewrite":
        return { ...head, result: fault.rewrite((await ask(call)).result, params) };
      case "error":
        if (fault.after === true) await ask(call);
        return {
          ...head,
          error: { code: fault.code ?? -32_000, message: fault.message ?? "internal error" },
        };
      default:
        if (fault.after === true) await ask(call);
        return { instead: fault };
    }
  };

  const door = await openDoor(async (body) => {
    const calls: RpcCall | RpcCall[] = JSON.parse(body);
    const answers: RpcAnswer[] = [];
    let instead: Instead | undefined;
    for (const call of Array.isArray(calls) ? calls : [calls]) {
      const answer = await answerCall(call);
      if ("instead" in answer) instead ??= answer.instead;
      else answers.push(answer);
    }
    return instead ?? { kind: "garbage", text: JSON.stringify(Array.isArray(calls) ? answers : answers[0]) };
  });

  return {
    url: door.url,
    on(method, fault, times = Number.POSITIVE_INFINITY) {
      faults.set(method, [...(faults.get(method) ?? []), { fault, left: times }]);
    },
    heal(method) {
      if (method === undefined) {
        faults.clear();
        newestOf = null;
      } else faults.delete(method);
    },
    behind(blocks) {
      newestOf = (head) => Math.max(head - blocks, 0);
    },
    standStill(number) {
      newestOf = (head) => Math.min(head, number);
    },
    count: (method) => arrivals.of(method),
    params: (method) => recorded.get(method) ?? [],
    called: (method, times = 1) => arrivals.reached(method, times),
    passed: (method, times = 1) => passages.reached(method, times),
    refuse: door.close,
    restore: door.reopen,
    stop: door.close,
  };
}

function counter() {
  const counts = new Map<string, number>();
  const waiting: { method: string; times: number; resolve(): void }[] = [];
  const of = (method: string) => counts.get(method) ?? 0;
  return {
    of,
    count(method: string) {
      counts.set(method, of(method) + 1);
      for (const each of waiting) if (each.method === method && each.times <= of(method)) each.resolve();
    },
    reached(method: string, times: number): Promise<void> {
      if (of(method) >= times) return Promise.resolve();
      return new Promise((resolve) => waiting.push({ method, times, resolve }));
    },
  };
}

/** The HTTP side. Node's server, for it can end a connection without an answer. */
async function openDoor(handle: (body: string) => Promise<Instead>) {
  const sockets = new Set<Socket>();
  const answer = async (request: IncomingMessage, response: ServerResponse) => {
    let body = "";
    for await (const piece of request) body += piece;
    const fate = await handle(body).catch((): Instead => ({ kind: "page", status: 502 }));
    switch (fate.kind) {
      case "hang":
        return;
      case "break":
        request.socket.destroy();
        return;
      case "page":
        response.writeHead(fate.status, { "content-type": "text/html" });
        response.end(`<html><body><h1>${fate.status}</h1></body></html>`);
        return;
      case "garbage":
        response.writeHead(200, { "content-type": "application/json" });
        response.end(fate.text);
    }
  };
  const listen = async (port: number): Promise<Server> => {
    const server = createServer((request, response) => void answer(request, response).catch(() => {}));
    server.on("connection", (socket) => {
      sockets.add(socket);
      socket.on("close", () => sockets.delete(socket));
    });
    await new Promise<void>((resolve, reject) => {
      server.once("error", reject);
      server.listen(port, "127.0.0.1", resolve);
    });
    return server;
  };
  let server = await listen(0);
  const address = server.address();
  if (address === null || typeof address === "string") throw new Error("the relay has no port");
  const { port } = address;
  const close = async () => {
    const closed = new Promise<void>((resolve) => server.close(() => resolve()));
    for (const socket of sockets) socket.destroy();
    await closed;
  };
  return {
    url: `http://127.0.0.1:${port}`,
    close,
    async reopen() {
      server = await listen(port);
    },
  };
}

async function askNode(url: string, call: RpcCall): Promise<RpcAnswer> {
  const response = await fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...call, jsonrpc: "2.0" }),
  });
  return (await response.json()) as RpcAnswer;
}

/** Which parameter of a method names the block whose state is asked for. */
const BLOCK_PARAMETER: Readonly<Record<string, number>> = {
  eth_call: 1,
  eth_estimateGas: 1,
  eth_getBalance: 1,
  eth_getCode: 1,
  eth_getTransactionCount: 1,
  eth_getBlockByNumber: 0,
  eth_getBlockReceipts: 0,
  eth_feeHistory: 1,
};

/** Asks the node what it would have said when this was its newest block. */
async function askBehind(url: string, call: RpcCall, newestOf: (head: number) => number): Promise<RpcAnswer> {
  const head = await askNode(url, { id: 0, method: "eth_blockNumber" });
  const newest = newestOf(Number(head.result));
  const params = [...(call.params ?? [])];
  const at = BLOCK_PARAMETER[call.method];
  if (at !== undefined) {
    const block = params[at] ?? "latest";
    if (block === "latest" || block === "pending") params[at] = `0x${newest.toString(16)}`;
    else if (call.method !== "eth_getBlockByNumber" && (await heightOf(url, block)) > newest) {
      return { jsonrpc: "2.0", id: call.id ?? null, error: { code: -32_000, message: "header not found" } };
    }
  }
  const answer = await askNode(url, { ...call, params });
  return "result" in answer ? { ...answer, result: unaware(call.method, answer.result, newest) } : answer;
}

/** Of a block that is named by its number, or by its hash as in EIP-1898. */
async function heightOf(url: string, block: unknown): Promise<number> {
  if (typeof block === "string") return Number(block);
  const { blockHash } = block as { blockHash?: unknown };
  const { result } = await askNode(url, { id: 0, method: "eth_getBlockByHash", params: [blockHash, false] });
  return Number((result as { number?: unknown } | null)?.number ?? 0);
}

/** The result without what is in blocks after `newest`. */
function unaware(method: string, result: unknown, newest: number): unknown {
  const known = (value: unknown): boolean => {
    if (typeof value !== "object" || value === null) return true;
    const { number, blockNumber = number } = value as { number?: unknown; blockNumber?: unknown };
    return typeof blockNumber !== "string" || Number(blockNumber) <= newest;
  };
  if (method === "eth_blockNumber") return `0x${newest.toString(16)}`;
  if (Array.isArray(result)) return result.filter(known);
  return known(result) ? result : null;
}
