// One JSON-RPC exchange over HTTP, bounded in time and size and read strictly: what chain nodes and remote signers
// have in common. Its errors never hold a URL, for the URLs of nodes carry API keys.
import { readBody } from "../http/client/body.ts";
import { type Outbound, OutboundError } from "../http/client/outbound.ts";

const MESSAGE_CHARACTERS_MAX = 300;

/** What the server answered instead of a result. */
export class RpcError extends Error {
  override readonly name = "RpcError";
  readonly code: number;
  /** As it came: nodes put the data of a revert here, in several forms. */
  readonly data: unknown;

  constructor(code: number, message: string, data: unknown) {
    super(shown(message));
    this.code = code;
    this.data = data;
  }
}

/** There was no answer that can be used: none at all, none in time, or not one in the protocol's form. */
export class NoAnswer extends Error {
  override readonly name = "NoAnswer";
}

export interface RpcServer {
  readonly outbound: Outbound;
  readonly url: string;
  readonly timeoutMs: number;
  readonly answerBytesMax: number;
}

/** What the servers say goes to the log and to the store: one line of printable characters, and not a long one. */
function shown(text: string): string {
  // biome-ignore lint/suspicious/noControlCharactersInRegex: control characters are what it removes.
  const line = text.replace(/[\u0000-\u001f\u007f]+/g, " ").toWellFormed();
  return line.length > MESSAGE_CHARACTERS_MAX ? `${line.slice(0, MESSAGE_CHARACTERS_MAX)}…`.toWellFormed() : line;
}

const encoder = new TextEncoder();
/** Every exchange has a connection to itself, so one ID serves all. */
const ID = 1;

/** @throws RpcError, NoAnswer */
export async function exchange(server: RpcServer, method: string, params: readonly unknown[]): Promise<unknown> {
  const body = encoder.encode(JSON.stringify({ jsonrpc: "2.0", id: ID, method, params }));
  const { status, bytes } = await post(server, body);
  const answer = parse(bytes);
  if (answer === null || answer["jsonrpc"] !== "2.0") throw new NoAnswer(`status ${status}, no JSON-RPC answer`);
  const isOverloaded = status >= 500 || status === 429;
  const { error } = answer;
  if (isObject(error) && !isOverloaded) {
    // An error about a request that could not be read has no id.
    if (answer["id"] !== ID && answer["id"] !== null) throw new NoAnswer("an answer to another request");
    const { code, message, data } = error;
    if (typeof code === "number" && typeof message === "string") throw new RpcError(code, message, data);
  }
  if (status !== 200) throw new NoAnswer(`status ${status}`);
  if (answer["id"] !== ID) throw new NoAnswer("an answer to another request");
  if (!Object.hasOwn(answer, "result")) throw new NoAnswer("an answer without a result");
  return answer["result"];
}

async function post(server: RpcServer, body: Uint8Array): Promise<{ status: number; bytes: Uint8Array }> {
  const { outbound, url, timeoutMs, answerBytesMax } = server;
  try {
    const response = await outbound.request(url, {
      method: "POST",
      headers: [
        ["content-type", "application/json"],
        ["accept", "application/json"],
      ],
      body,
      signal: AbortSignal.timeout(timeoutMs),
    });
    const { captured, tooLarge } = await readBody(response, {
      maxBytes: answerBytesMax,
      captureBytes: answerBytesMax,
    });
    if (tooLarge) throw new NoAnswer("the answer is too large");
    return { status: response.status, bytes: captured };
  } catch (error) {
    throw error instanceof NoAnswer ? error : new NoAnswer(reasonOf(error, timeoutMs));
  }
}

/** The cause itself is not kept, since its message names the host, and some hosts hold a key in their name. */
function reasonOf(error: unknown, timeoutMs: number): string {
  if (error instanceof OutboundError) return `${error.kind}, ${error.message.split(": ").at(-1)}`;
  if (error instanceof Error && error.name === "TimeoutError") return `no answer within ${timeoutMs} ms`;
  return "the request failed";
}

function isObject(value: unknown): value is Readonly<Record<string, unknown>> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function parse(bytes: Uint8Array): Readonly<Record<string, unknown>> | null {
  try {
    const value: unknown = JSON.parse(new TextDecoder().decode(bytes));
    return isObject(value) ? value : null;
  } catch {
    return null;
  }
}
