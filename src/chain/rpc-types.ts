// The values of the Ethereum JSON-RPC protocol, read strictly: a node's answer that is not in the form of the
// protocol is no answer. Pure.
import type { Hex } from "../x402/types.ts";

export interface Block {
  readonly number: number;
  readonly hash: Hex;
  readonly parentHash: Hex;
  /** Unix seconds. */
  readonly timestamp: number;
  /** Wei per gas. */
  readonly baseFee: bigint;
}

export interface LogEntry {
  readonly address: Hex;
  readonly topics: readonly Hex[];
  readonly data: Hex;
  readonly transactionHash: Hex;
}

export interface Receipt {
  readonly hash: Hex;
  /** The sender, in lower case; null when the node leaves it out. */
  readonly from: Hex | null;
  readonly blockNumber: number;
  readonly blockHash: Hex;
  readonly succeeded: boolean;
  /** What its gas cost, with what a rollup takes for its place in the chain below. */
  readonly gasWei: bigint;
  readonly logs: readonly LogEntry[];
}

const QUANTITY = /^0x(0|[1-9a-f][0-9a-f]{0,63})$/i;
const DATA = /^0x([0-9a-f]{2})*$/i;

function wrong(what: string): TypeError {
  return new TypeError(`not ${what}`);
}

function field(value: unknown, name: string): unknown {
  if (typeof value !== "object" || value === null) throw wrong("an object");
  return Object.getOwnPropertyDescriptor(value, name)?.value;
}

/** @throws TypeError, as all readers here do */
export function quantity(value: unknown): bigint {
  if (typeof value !== "string" || !QUANTITY.test(value)) throw wrong("a quantity");
  return BigInt(value);
}

export function count(value: unknown): number {
  const number = Number(quantity(value));
  if (!Number.isSafeInteger(number)) throw wrong("a number of common size");
  return number;
}

/** Bytes as hex, in lower case. */
export function data(value: unknown): Hex {
  if (typeof value !== "string" || !DATA.test(value)) throw wrong("hex data");
  return `0x${value.slice(2).toLowerCase()}`;
}

export function hash(value: unknown): Hex {
  const bytes = data(value);
  if (bytes.length !== 66) throw wrong("32 bytes");
  return bytes;
}

/** A word of the EVM that is a number. */
export function word(value: unknown): bigint {
  return BigInt(hash(value));
}

/** One that is a truth value. */
export function truth(value: unknown): boolean {
  const number = word(value);
  if (number > 1n) throw wrong("a truth value");
  return number === 1n;
}

function address(value: unknown): Hex {
  const bytes = data(value);
  if (bytes.length !== 42) throw wrong("20 bytes");
  return bytes;
}

function list(value: unknown): readonly unknown[] {
  if (!Array.isArray(value)) throw wrong("a list");
  return value;
}

/** Null for a block that the node does not know. */
export function block(value: unknown): Block | null {
  if (value === null) return null;
  return {
    number: count(field(value, "number")),
    hash: hash(field(value, "hash")),
    parentHash: hash(field(value, "parentHash")),
    timestamp: count(field(value, "timestamp")),
    baseFee: quantity(field(value, "baseFeePerGas")),
  };
}

/** Of a block that may not be made yet, which has no hash and no number then; null where there is none. */
export function timestamp(block: unknown): number | null {
  return block === null ? null : count(field(block, "timestamp"));
}

function logEntry(value: unknown): LogEntry {
  return {
    address: address(field(value, "address")),
    topics: list(field(value, "topics")).map(hash),
    data: data(field(value, "data")),
    transactionHash: hash(field(value, "transactionHash")),
  };
}

/** Entries of blocks that are not part of the chain any more are left out (`removed`). */
export function logEntries(value: unknown): LogEntry[] {
  return list(value)
    .filter((each) => field(each, "removed") !== true)
    .map(logEntry);
}

/** A node may leave out any of the fields: that is no reason to have no receipt. */
function gasWei(receipt: unknown): bigint {
  const [used, price, below] = ["gasUsed", "effectiveGasPrice", "l1Fee"].map((name) => {
    const given = field(receipt, name);
    return given === undefined || given === null ? 0n : quantity(given);
  });
  return (used ?? 0n) * (price ?? 0n) + (below ?? 0n);
}

function senderOf(from: unknown): Hex | null {
  return from === undefined || from === null ? null : data(from);
}

/** Null for a transaction that is in no block that the node knows of. */
export function receipt(value: unknown): Receipt | null {
  if (value === null) return null;
  const status = count(field(value, "status"));
  if (status > 1) throw wrong("a status");
  return {
    hash: hash(field(value, "transactionHash")),
    from: senderOf(field(value, "from")),
    blockNumber: count(field(value, "blockNumber")),
    blockHash: hash(field(value, "blockHash")),
    succeeded: status === 1,
    gasWei: gasWei(value),
    logs: list(field(value, "logs")).map(logEntry),
  };
}

/** A number as the protocol writes it. */
export function hex(value: number | bigint): Hex {
  return `0x${value.toString(16)}`;
}
