// `tollgate receipt verify`: checks a file of receipts against a set of public keys, without a database or a gateway. The file
// is read line by line, so it may be long.
import { accessSync, constants, statSync } from "node:fs";
import { open } from "node:fs/promises";
import { fileProblem, readTextFile, systemReason } from "../config/values.ts";
import { errorCode } from "../core/fault.ts";
import { isLoopback } from "../core/host.ts";
import { StartupProblem } from "../core/startup.ts";
import { createReceiptChain, type ReceiptKeys, receiptKeys, type VerifiedChain } from "../gateway/receipts/claims.ts";
import { OutboundError } from "../http/client/exchange.ts";
import { createOutbound, fetchDocument } from "../http/client/outbound.ts";
import { type CommandLine, type CommandVerdict, Misuse, neededFlag } from "./command-line.ts";
import { type Progress, withProgress } from "./terminal/interactive.ts";

const FILE_BYTES_MAX = 1024 ** 3;
const LINE_BYTES_MAX = 64 * 1024;

const JWKS_IS = "a JSON Web Key Set, as a file or as the URL of a gateway's /.well-known/jwks.json";

/** @throws Misuse; StartupProblem when the file or the keys can't be read */
export async function verify(line: CommandLine): Promise<CommandVerdict> {
  const [file = ""] = line.words;
  const jwks = neededFlag(line, "jwks", JWKS_IS);
  try {
    if (file !== "") accessSync(file, constants.R_OK);
  } catch (cause) {
    line.problems.push(`FILE ${fileProblem(file, cause, true)}`);
  }
  if (line.problems.length > 0) throw new Misuse(line.problems);
  const keys = await readKeys(jwks);
  return withProgress(`verifying ${file}`, (progress) => judgeFile(file, keys, progress));
}

async function judgeFile(file: string, keys: ReceiptKeys, { done }: Progress): Promise<CommandVerdict> {
  const chain = createReceiptChain(keys);
  const all = statSync(file, { throwIfNoEntry: false })?.size ?? 0;
  let [number, bytes] = [0, 0];
  for await (const line of linesOf(file)) {
    number += 1;
    bytes += line.length + 1;
    done(bytes, all);
    if (line.length > LINE_BYTES_MAX) return broken(number, null, "it is too long for a receipt");
    const found = await chain.take(line);
    if (found !== null) return broken(number, found.receipt_id, found.problem);
  }
  if (number > 0) return { holds: true, text: describe(chain), document: documented(chain, null) };
  const document = documented(null, { line: null, receipt_id: null, problem: "it is empty" });
  return { holds: false, text: `there are no receipts in ${file}\n`, document };
}

function broken(line: number, id: string | null, problem: string): CommandVerdict {
  const text = `line ${line}${id === null ? "" : `, ${id},`} does not hold: ${problem}\n`;
  return { holds: false, text, document: documented(null, { line, receipt_id: id, problem }) };
}

type Broken = { line: number | null; receipt_id: string | null; problem: string };

function documented(chain: VerifiedChain | null, broken: Broken | null) {
  const { length = 0, first = null, last = null } = chain ?? {};
  return {
    holds: broken === null,
    receipts: length,
    tenant: first?.tenant ?? null,
    previous: first?.previous ?? null,
    last: last === null ? null : { receipt_id: last.receipt_id, completed_at: last.completed_at },
    broken,
  };
}

/** The verdict on a whole file. It names the last receipt, since a file that was cut off at a line looks complete. */
function describe({ length, first, last }: VerifiedChain): string {
  const whose = `tenant ${JSON.stringify(first?.tenant ?? "")}`;
  const what = length === 1 ? "1 receipt is valid" : `${length} receipts are valid, in one unbroken chain`;
  const isFirst = first?.previous == null;
  const from = isFirst ? "from the tenant's first" : "following an earlier one, which is not in this file";
  const end = last === null ? "" : `the last one is ${last.receipt_id}, of ${last.completed_at}\n`;
  return `${what}: ${whose}, ${from}\n${end}`;
}

/** The lines without their line feeds; the last line may lack one. */
async function* linesOf(path: string): AsyncGenerator<string, void> {
  let size = 0;
  let rest = "";
  for await (const chunk of bytesOf(path)) {
    size += chunk.length;
    if (size > FILE_BYTES_MAX) throw new StartupProblem(`FILE must have at most ${FILE_BYTES_MAX} bytes: ${path}`);
    const lines = (rest + chunk.toString("latin1")).split("\n");
    rest = lines.pop() ?? "";
    yield* lines;
    // The line is too long already, so the rest of it is not read.
    if (rest.length > LINE_BYTES_MAX) break;
  }
  if (rest !== "") yield rest;
}

async function* bytesOf(path: string): AsyncGenerator<Buffer, void> {
  try {
    const handle = await open(path, "r");
    yield* handle.createReadStream();
  } catch (cause) {
    throw new StartupProblem(`FILE must be readable: ${fileProblem(path, cause, true)}`, { cause });
  }
}

async function readKeys(where: string): Promise<ReceiptKeys> {
  const isUrl = /^[a-z]+:\/\//i.test(where);
  const must = "--jwks must be a JSON Web Key Set with an Ed25519 key";
  try {
    const keys = await receiptKeys(await (isUrl ? fetchKeys(where) : JSON.parse(readTextFile(where))));
    if (keys !== null) return keys;
  } catch (cause) {
    const why = isUrl || cause instanceof SyntaxError ? `${where}: ${reason(cause)}` : fileProblem(where, cause, true);
    throw new StartupProblem(`${must}: ${why}`, { cause });
  }
  throw new StartupProblem(`${must}: ${where} holds none`);
}

/** The user chose the URL, so any host is allowed, but not plain HTTP to another host, by which keys could be replaced. */
function fetchKeys(url: string): Promise<unknown> {
  const { protocol, hostname } = new URL(url);
  if (protocol !== "https:" && !isLoopback(hostname)) {
    throw new Error("keys must come over https, or over http from this machine (localhost, 127.0.0.1, [::1])");
  }
  return fetchDocument(createOutbound({ rules: null, extraCa: null }), url);
}

function reason(error: unknown): string {
  if (error instanceof SyntaxError) return "it is not JSON";
  if (error instanceof OutboundError) return error.message;
  if (errorCode(error) !== null) return systemReason(error);
  return error instanceof Error ? error.message : "unknown";
}
