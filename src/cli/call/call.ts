// `tollgate call`: makes one call over HTTP, pays its price up to --max-price, and prints the agent's response. Standard output has
// only the response, byte for byte; everything else goes to standard error.
import { fstatSync } from "node:fs";
import type { Static, TSchema } from "@sinclair/typebox";
import type { Kind } from "../../config/values.ts";
import * as values from "../../config/values.ts";
import { isLoopback } from "../../core/host.ts";
import { isId } from "../../core/id.ts";
import { VERSION } from "../../core/startup.ts";
import { suggest } from "../../core/text.ts";
import { bodyChunks } from "../../http/client/body.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { createOutbound } from "../../http/client/outbound.ts";
import { STATUS, SUCCESS } from "../../http/responses.ts";
import { MAX } from "../../kernel/limits.ts";
import { isJsonObject } from "../../wire/json.ts";
import { type CommandLine, type CommandVerdict, configured, Misuse, shownWord } from "../command-line.ts";
import { withProgress } from "../terminal/interactive.ts";
import { AGENT, AGENTS, ask, type CallView, fieldProblem, jsonOf, outboundError } from "./access.ts";
import {
  askForEnd,
  awaitEnd,
  type CallRun,
  cutShort,
  goesOn,
  inDoubt,
  noGateway,
  RunEnd,
  refused,
  sendCall,
  tell,
  tellUncollected,
  unreached,
  whyFailed,
} from "./send.ts";

export async function call(line: CommandLine): Promise<CommandVerdict> {
  const run = await readRun(line);
  const name = line.words[0] ?? "";
  endOnSignals(run);
  try {
    const { id, protocol } = await findAgent(run, name);
    run.path = `/v1/proxy/${id}`;
    const what = `calling ${shownWord(name)}`;
    const streams = () => streamed(run, protocol === "mcp", what);
    const document = await (run.streams ? streams() : polled(run, what, line.flags.has("json")));
    return { holds: true, text: "", document };
  } catch (error) {
    const end = error instanceof OutboundError ? unreached(run, error) : error;
    if (!(end instanceof RunEnd)) throw error;
    tell(end.message);
    const document = end.document ?? { problems: [end.message], invocation_id: run.invocation };
    return { holds: false, text: "", document, status: end.status };
  }
}

const TOKEN_IS_MISSING =
  "a token is missing: set TOLLGATE_TOKEN, or name a file with --token-file (tollgate token prints one)";

async function readRun(line: CommandLine): Promise<CallRun> {
  const { flags, problems } = line;
  const waitMs = 1000 * flagValue(line, "wait", values.wholeNumber(0, 86_400), 60);
  const maxPrice = flagValue(line, "max-price", values.usdcAmount, 0n);
  const url = flagValue(line, "url", values.httpUrl("no query"), "http://127.0.0.1:8080").replace(/\/+$/, "");
  const payerKey = flagValue(line, "payer-key-file", values.secretFile(values.privateKey), null);
  const ownToken = flagValue(line, "token-file", values.secretFile(values.bearerToken), null);
  const given = readData(line);
  if (flags.has("json") && flags.has("stream")) problems.push("--json can't be combined with --stream");
  const isNamed = flags.has("token-file");
  const { config, warnings } = configured(line, "call", ({ token }) =>
    token === null && !isNamed ? [TOKEN_IS_MISSING] : [],
  );
  for (const warning of warnings) tell(`warning: ${warning}`);
  const { protocol, hostname } = new URL(url);
  if (protocol === "http:" && !isLoopback(hostname)) {
    tell(`warning: ${url} is plain http, so others on the way can read the token and change prices`);
  }
  const data = given ?? (await readInput());
  const outbound = createOutbound({ rules: null, extraCa: config.extraCa });
  return {
    access: { url, token: ownToken ?? config.token ?? "", outbound },
    headers: { "idempotency-key": `call-${crypto.randomUUID()}`, ...contentType(data) },
    ...{ data, streams: flags.has("stream"), waitMs, maxPrice, payerKey },
    ...{ path: "", invocation: null, payment: null, isSent: false, isInDoubt: false },
    output: { decoder: new TextDecoder(), last: undefined, isCut: false },
  };
}

function flagValue<T, F>({ flags, problems }: CommandLine, flag: string, kind: Kind<T>, fallback: F): T | F {
  const text = flags.get(flag);
  if (text === undefined) return fallback;
  const value = text === "" ? undefined : kind.parse(text);
  if (value !== undefined) return value;
  problems.push(text === "" ? `--${flag} must not be empty` : values.valueProblem(`--${flag}`, kind, text));
  return fallback;
}

/** The body of the call; null when it comes from standard input, which is not read unless it is asked for. */
function readData({ flags, problems }: CommandLine): Uint8Array | null {
  const data = flags.get("data");
  if (data === undefined && hasInput()) tell("note: standard input is not sent; --data - sends it");
  if (data === "-") return null;
  if (!data?.startsWith("@")) return Buffer.from(data ?? "");
  const path = data.slice(1);
  try {
    if (path !== "") return values.readBytesFile(path, MAX.bodyBytes);
    problems.push("--data @ must name a file: @FILE");
  } catch (error) {
    problems.push(`--data must name a readable file after @: ${values.fileProblem(path, error, true)}`);
  }
  return new Uint8Array();
}

/** Whether standard input is a file or a pipe that somebody may have meant for the call. */
function hasInput(): boolean {
  try {
    const input = fstatSync(0);
    return input.isFIFO() || input.isFile();
  } catch {
    return false;
  }
}

async function readInput(): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  let length = 0;
  for await (const piece of process.stdin) {
    pieces.push(piece);
    length += piece.length;
    if (length > MAX.bodyBytes) throw new Misuse([`--data - must be at most ${MAX.bodyBytes} bytes`]);
  }
  return Buffer.concat(pieces);
}

function contentType(data: Uint8Array): Record<string, string> {
  if (data.length === 0) return {};
  try {
    const isJson = jsonOf(new TextDecoder("utf-8", { fatal: true }).decode(data)) !== undefined;
    return { "content-type": isJson ? "application/json" : "text/plain; charset=utf-8" };
  } catch {
    return { "content-type": "application/octet-stream" };
  }
}

/** On a signal, or when the reader of the output is gone (`… | head`), exits with the status that a shell expects. */
function endOnSignals(run: CallRun): void {
  const end = (status: number) => {
    const { invocation, streams, isSent, payment } = run;
    const paid = payment === null ? "" : ", and it may be paid already";
    const known = streams ? `the call ${invocation} ends as cancelled${paid}` : goesOn(run, paid);
    const unknown = isSent ? inDoubt(run) : "no call was made";
    tell(`stopped: ${invocation === null ? unknown : known}`);
    process.exit(status);
  };
  process.on("SIGINT", () => end(130));
  process.on("SIGTERM", () => end(143));
  process.stdout.on("error", (error: Error & { readonly code?: string }) => {
    if (error.code === "EPIPE") process.exit(141);
    tell(`the response of ${run.invocation} can't be written: ${error.code}`);
    process.exit(1);
  });
}

/** The answer to a request that changes nothing. @throws RunEnd when it is refused; OutboundError */
async function get<T extends TSchema>(run: CallRun, path: string, schema: T, signal: AbortSignal): Promise<Static<T>> {
  const answer = await ask(run.access, { method: "GET", path, signal });
  if (answer.status !== SUCCESS.ok) throw refused(run, answer);
  const problem = fieldProblem(schema, answer.body);
  if (problem === null) return answer.body as Static<T>;
  throw new RunEnd("refused", noGateway(run.access.url, `it answered 200, and ${problem}`));
}

/** @param name an ID, or the name of an agent. The protocol of an ID is asked for only if the call is streamed. */
async function findAgent(run: CallRun, name: string): Promise<{ readonly id: string; readonly protocol: unknown }> {
  const signal = AbortSignal.timeout(30_000);
  if (isId("agt", name)) {
    return run.streams ? get(run, `/v1/agents/${name}`, AGENT, signal) : { id: name, protocol: null };
  }
  const list = (query: string) => get(run, `/v1/agents?limit=${MAX.pageItems}${query}`, AGENTS, signal);
  for (let [offset, total] = [0, 1]; offset < total; offset += MAX.pageItems) {
    if (offset >= MAX.agentsSearched) {
      const first = `the first ${MAX.agentsSearched.toLocaleString("en-US")} that match`;
      throw new RunEnd("refused", `no agent is named ${shownWord(name)} among ${first}: give its ID`);
    }
    const page = await list(`&offset=${offset}&q=${encodeURIComponent(name)}`);
    const agent = page.data.find((each) => each.name === name);
    if (agent !== undefined) return agent;
    total = page.total;
  }
  const { data, total } = await list("");
  const names = data.map((agent) => agent.name);
  const meant = suggest(name, names);
  const some = `the tenant has ${names.slice(0, 10).map(shownWord).join(", ")}${total > 10 ? ` and ${total - 10} more` : ""}`;
  const hint = names.length === 0 ? "the tenant of the token has no agents" : some;
  const why = meant === null ? hint : `did you mean ${shownWord(meant)}?`;
  throw new RunEnd("refused", `no agent is named ${shownWord(name)}; ${why}`);
}

async function polled(run: CallRun, what: string, isJson: boolean): Promise<object> {
  const view = await withProgress(what, async () => {
    await sendCall(run, run.path);
    return awaitEnd(run);
  });
  await showEnd(run, view, isJson);
  return view;
}

/** Prints the response that the gateway has kept. @throws RunEnd if the call failed, or its response was lost or cut short */
async function showEnd(run: CallRun, view: CallView, isJson = false): Promise<void> {
  const body = view.response_body_b64;
  if (!isJson) await print(run, Buffer.from(body ?? "", "base64"));
  await endLine(run);
  if (view.status !== "succeeded") throw whyFailed(run, view);
  if (body === undefined && run.streams)
    throw cutShort(run, view, `the response of ${run.invocation} was lost with the connection`);
  tellUncollected(run, view);
  if (body === undefined) {
    const why = "capture_body of the agent is off (--stream passes it on)";
    tell(`note: the response of ${run.invocation} was not kept, ${why}`);
  } else if (view.response_truncated) {
    const problem = `only the start of the response of ${run.invocation} was kept (--stream passes all of it on)`;
    throw new RunEnd("failed", problem, view);
  }
}

/** Prints the agent's response as it comes. */
async function streamed(run: CallRun, isMcp: boolean, what: string): Promise<undefined> {
  const path = `${run.path}/stream`;
  const session = isMcp ? await openSession(run, path) : {};
  const { status, headers, stream = null } = await withProgress(what, () => sendCall(run, path, session));
  const isFailed = status >= 400;
  /** The start of an answer that is not known yet to be the agent's. */
  let held: Uint8Array | null = null;
  let problem = `the call ${run.invocation} failed: ${status}`;
  try {
    const limits = { maxBytes: Number.POSITIVE_INFINITY };
    if (!isFailed) {
      if (stream !== null) for await (const piece of bodyChunks(stream, limits)) await print(run, piece);
      await endLine(run);
      // If a facilitator had collected the payment, this header would say so.
      if (run.payment !== null && !headers.has("x-payment-response")) await noteUncollected(run);
      return;
    }
    const end = AbortSignal.timeout(5000);
    held = stream && (await startOf(bodyChunks(stream, { ...limits, signal: end }), end));
  } catch (error) {
    await endLine(run);
    problem = `the response of ${run.invocation} ended early: ${outboundError(error).message}`;
  } finally {
    const end = { method: "DELETE", path, headers: session, signal: AbortSignal.timeout(5000) } as const;
    if ("mcp-session-id" in session) await ask(run.access, end).catch(() => {});
  }
  await endOfStream(run, status, held, problem);
}

async function noteUncollected(run: CallRun): Promise<void> {
  const view = await askForEnd(run, 5).catch(() => null);
  if (view !== null) tellUncollected(run, view);
}

/** Ends a stream that failed or ended early. @throws RunEnd unless an earlier request made the call, and it succeeded */
async function endOfStream(run: CallRun, status: number, held: Uint8Array | null, problem: string): Promise<void> {
  // A 409 says that an earlier request was taken as this call, unless the 409 is the agent's own.
  const isRepeated = status === STATUS.conflict;
  const view = isRepeated ? await awaitEnd(run) : await askForEnd(run, 5).catch(() => null);
  const isOfAgent = held !== null && view?.upstream_status === status;
  if (isRepeated && view !== null && !isOfAgent) return showEnd(run, view);
  if (held !== null && isOfAgent) await print(run, held);
  await endLine(run);
  const told = held === null || isOfAgent ? problem : `${problem} ${Buffer.from(held)}`;
  // An answer that is not the agent's is no response that ended early.
  throw cutShort(run, held === null || view?.status === "failed" ? view : null, told);
}

/** The start of a response, which may never end: at least what the gateway would keep, or what had come at the signal. */
async function startOf(pieces: AsyncIterable<Uint8Array>, end: AbortSignal): Promise<Uint8Array> {
  const read: Uint8Array[] = [];
  let length = 0;
  try {
    for await (const piece of pieces) {
      read.push(piece);
      length += piece.length;
      if (length >= MAX.capturedBytes) break;
    }
  } catch (error) {
    if (!end.aborted) throw error;
  }
  return Buffer.concat(read);
}

/** Opens a session with an MCP server that asks for one. @returns the headers that a call in this session needs */
async function openSession({ access, data }: CallRun, path: string): Promise<Record<string, string>> {
  const headers = { accept: "application/json, text/event-stream" };
  const message = jsonOf(Buffer.from(data).toString());
  if (isJsonObject(message) && message["method"] === "initialize") return headers;
  const rpc = (fields: object, more: object) =>
    ask(access, {
      ...{ method: "POST", path, signal: AbortSignal.timeout(30_000) },
      headers: { ...headers, "content-type": "application/json", ...more },
      body: Buffer.from(JSON.stringify({ jsonrpc: "2.0", ...fields })),
    });
  const clientInfo = { name: "tollgate", version: VERSION };
  const params = { protocolVersion: "2025-11-25", capabilities: {}, clientInfo };
  const id = (await rpc({ id: 0, method: "initialize", params }, {})).headers.get("mcp-session-id");
  if (id === null) return headers;
  const session = { "mcp-session-id": id };
  await rpc({ method: "notifications/initialized" }, session);
  return { ...headers, ...session };
}

const CONTROL_CHARACTER = /[^\P{Cc}\s]/u;

/** Writes to standard output. A terminal would obey an agent's control characters, so they and what follows are not shown. */
async function print({ output, invocation }: CallRun, bytes: Uint8Array): Promise<void> {
  if (output.isCut || bytes.length === 0) return;
  if (process.stdout.isTTY && CONTROL_CHARACTER.test(output.decoder.decode(bytes, { stream: true }))) {
    output.isCut = true;
    const why = "has control characters and is not shown on a terminal: send it to a file (> FILE)";
    tell(`note: the response of ${invocation} ${why}`);
    return;
  }
  output.last = bytes.at(-1);
  await written(bytes);
}

/** On a terminal, adds the line feed that a response may lack at its end, so that the prompt begins a line. */
async function endLine({ output }: CallRun): Promise<void> {
  if (!process.stdout.isTTY || output.last === undefined || output.last === 0x0a) return;
  output.last = 0x0a;
  await written(Buffer.from("\n"));
}

function written(bytes: Uint8Array): Promise<void> {
  const { promise, resolve } = Promise.withResolvers<void>();
  process.stdout.write(bytes, () => resolve());
  return promise;
}
