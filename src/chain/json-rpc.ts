// One JSON-RPC exchange over HTTP, bounded in time and size, with a chain node or a remote signer, and strict readers of the
// results. Errors never contain a URL, since nodes' URLs carry API keys. A malformed answer counts as no answer.
import { printable } from "../core/text.ts";
import { OutboundError } from "../http/client/exchange.ts";
import { exchangeJson, type JsonAnswer, type Outbound } from "../http/client/outbound.ts";
import { isJsonObject } from "../wire/json.ts";
import type { Hex } from "../x402/types.ts";

const MESSAGE_CHARACTERS_MAX = 300;

/** What the server answered instead of a result. */
export class RpcError extends Error {
  override readonly name = "RpcError";
  readonly code: number;

  constructor(code: number, message: string) {
    super(shortLine(message));
    this.code = code;
  }
}

/** There was no usable answer: none at all, none in time, or a malformed one. */
export class NoAnswer extends Error {
  override readonly name = "NoAnswer";
}

export interface RpcServer {
  readonly outbound: Outbound;
  readonly url: string;
  readonly timeoutMs: number;
  readonly answerBytesMax: number;
}

/** Servers' messages go to the log and the store, so they become one short line of printable characters. */
function shortLine(text: string): string {
  const line = printable(text).toWellFormed();
  return line.length > MESSAGE_CHARACTERS_MAX ? `${line.slice(0, MESSAGE_CHARACTERS_MAX)}…`.toWellFormed() : line;
}

/** Every exchange has a connection of its own, so one ID serves all. */
const ID = 1;

/** @throws RpcError, NoAnswer */
export async function exchange(server: RpcServer, method: string, params: readonly unknown[]): Promise<unknown> {
  const { status, body: answer } = await post(server, { jsonrpc: "2.0", id: ID, method, params });
  if (!isJsonObject(answer) || answer["jsonrpc"] !== "2.0") throw new NoAnswer(`status ${status}, no JSON-RPC answer`);
  const isOverloaded = status >= 500 || status === 429;
  const { error } = answer;
  if (isJsonObject(error) && !isOverloaded) {
    // An error about a request that could not be read has no id.
    if (answer["id"] !== ID && answer["id"] !== null) throw new NoAnswer("an answer to another request");
    const { code, message } = error;
    if (typeof code === "number" && typeof message === "string") throw new RpcError(code, message);
  }
  if (status !== 200) throw new NoAnswer(`status ${status}`);
  if (answer["id"] !== ID) throw new NoAnswer("an answer to another request");
  if (!Object.hasOwn(answer, "result")) throw new NoAnswer("an answer without a result");
  return answer["result"];
}

async function post({ outbound, url, timeoutMs, answerBytesMax }: RpcServer, question: object): Promise<JsonAnswer> {
  const headers = [["content-type", "application/json"] as const];
  const body = new TextEncoder().encode(JSON.stringify(question));
  const request = { method: "POST", headers, body, signal: AbortSignal.timeout(timeoutMs) };
  try {
    return await exchangeJson(outbound, url, request, answerBytesMax);
  } catch (error) {
    throw new NoAnswer(reasonOf(error, timeoutMs));
  }
}

/** The cause itself is not kept, since its message names the host, and some hosts hold a key in their name. */
function reasonOf(error: unknown, timeoutMs: number): string {
  if (error instanceof OutboundError) return `${error.kind}, ${error.message.split(": ").at(-1)}`;
  if (error instanceof Error && error.name === "TimeoutError") return `no answer within ${timeoutMs} ms`;
  return "the request failed";
}

const QUANTITY = /^0x(0|[1-9a-f][0-9a-f]{0,63})$/i;
const DATA = /^0x([0-9a-f]{2})*$/i;

const malformed = (what: string) => new TypeError(`not ${what}`);

function field(value: unknown, name: string): unknown {
  if (typeof value !== "object" || value === null) throw malformed("an object");
  return Object.getOwnPropertyDescriptor(value, name)?.value;
}

/** @throws TypeError, as all readers here do */
export function quantity(value: unknown): bigint {
  if (typeof value !== "string" || !QUANTITY.test(value)) throw malformed("a quantity");
  return BigInt(value);
}

export function count(value: unknown): number {
  const number = Number(quantity(value));
  if (!Number.isSafeInteger(number)) throw malformed("a safe integer");
  return number;
}

/** Bytes as hex, in lower case. */
export function data(value: unknown): Hex {
  if (typeof value !== "string" || !DATA.test(value)) throw malformed("hex data");
  return `0x${value.slice(2).toLowerCase()}`;
}

function bytes(value: unknown, size: number): Hex {
  const found = data(value);
  if (found.length !== 2 + 2 * size) throw malformed(`${size} bytes`);
  return found;
}

export const hash = (value: unknown): Hex => bytes(value, 32);

/** A 32-byte EVM word as an unsigned integer. */
export const word = (value: unknown): bigint => BigInt(hash(value));

/** A 32-byte EVM word as a boolean. */
export function truth(value: unknown): boolean {
  const number = word(value);
  if (number > 1n) throw malformed("a boolean");
  return number === 1n;
}

function list(value: unknown): readonly unknown[] {
  if (!Array.isArray(value)) throw malformed("a list");
  return value;
}

export type Block = NonNullable<ReturnType<typeof block>>;

/** Null for a block that the node does not know. */
export function block(value: unknown) {
  if (value === null) return null;
  return {
    number: count(field(value, "number")),
    hash: hash(field(value, "hash")),
    parentHash: hash(field(value, "parentHash")),
    /** Unix seconds. */
    timestamp: count(field(value, "timestamp")),
    /** Wei per gas. */
    baseFee: quantity(field(value, "baseFeePerGas")),
  };
}

/** The time of a block that may be pending, and then has neither hash nor number; null where there is no block. */
export const timestamp = (block: unknown): number | null => (block === null ? null : count(field(block, "timestamp")));

export type LogEntry = Readonly<ReturnType<typeof logEntry>>;

function logEntry(value: unknown) {
  return {
    address: bytes(field(value, "address"), 20),
    topics: list(field(value, "topics")).map(hash) as readonly Hex[],
    data: data(field(value, "data")),
    transactionHash: hash(field(value, "transactionHash")),
  };
}

/** Entries of blocks that a reorganisation took out of the chain (`removed`) are left out. */
export function logEntries(value: unknown): LogEntry[] {
  const kept = list(value).filter((each) => field(each, "removed") !== true);
  return kept.map(logEntry);
}

/** A node may leave out any of these fields. They count as 0, so that the receipt can be used all the same. */
function gasWei(receipt: unknown): bigint {
  const [used, price, below] = ["gasUsed", "effectiveGasPrice", "l1Fee"].map((name) => {
    const given = field(receipt, name) ?? null;
    return given === null ? 0n : quantity(given);
  });
  return (used ?? 0n) * (price ?? 0n) + (below ?? 0n);
}

export type Receipt = Readonly<NonNullable<ReturnType<typeof receipt>>>;

/** Null for a transaction that is in no block known to the node. */
export function receipt(value: unknown) {
  if (value === null) return null;
  const status = count(field(value, "status"));
  if (status > 1) throw malformed("a status");
  const from = field(value, "from") ?? null;
  return {
    hash: hash(field(value, "transactionHash")),
    /** The sender, in lower case; null when the node leaves it out. */
    from: from === null ? null : data(from),
    blockNumber: count(field(value, "blockNumber")),
    blockHash: hash(field(value, "blockHash")),
    succeeded: status === 1,
    /** The whole fee: gas, and on a rollup the L1 data fee. */
    gasWei: gasWei(value),
    logs: list(field(value, "logs")).map(logEntry) as readonly LogEntry[],
  };
}

/** A number as the protocol writes it. */
export const hex = (value: number | bigint): Hex => `0x${value.toString(16)}`;
