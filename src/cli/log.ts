// The log on standard error: one line per event, as JSON or coloured text for a terminal. Lines are buffered and written
// together, since a system call per line would be expensive on the accept path. The rest is written when the process exits. A
// log that can't be written never stops the product: lines are dropped and counted.
import { constants, openSync, writeSync } from "node:fs";
import { isatty } from "node:tty";
import { attempt, errorCode } from "../core/fault.ts";
import { LOG_LEVELS, type LogFields, type LogLevel } from "../core/log.ts";
import { printableJson } from "../core/text.ts";
import type { Clock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";

const STANDARD_ERROR = 2;
/** Less than an empty pipe holds (64 KiB). With 16 KiB an accept on SQLite took 3 % more of the main thread (measured). */
const FLUSH_AT_CHARACTERS = 49_152;
/** Buffer space for warnings and errors alone, so that many lines at lower levels don't crowd them out. */
const RESERVED_CHARACTERS = 4_194_304;
const VALUE_CHARACTERS_MAX = 4096;

export interface LogOptions {
  readonly level: LogLevel;
  readonly format: "json" | "pretty";
  readonly clock: Clock;
  /** Writes as many of the bytes as possible and returns how many; throws if it can write none. Set by tests. */
  readonly write?: (bytes: Uint8Array) => number;
}

export function openLog(options: LogOptions) {
  const sink = openSink(options.write ?? standardError());
  const least = LOG_LEVELS.indexOf(options.level);
  const print = options.format === "json" ? jsonLine : prettyLine;
  const timestamp = timestamps(options.clock);
  const at = (level: LogLevel) => {
    if (LOG_LEVELS.indexOf(level) < least) return () => {};
    return (event: string, fields: LogFields = {}) => {
      sink.add(print(timestamp(), level, event, fields), level === "warn" || level === "error");
      // The process may be about to end because of this error.
      if (level === "error") sink.flush();
    };
  };
  process.on("exit", sink.flush);
  return { debug: at("debug"), info: at("info"), warn: at("warn"), error: at("error"), flush: sink.flush };
}

/** `flush` writes what is buffered now; it is called at exit too. */
export type OpenLog = ReturnType<typeof openLog>;

/** Reopens a terminal in non-blocking mode: once its reader stops (Ctrl-S), a blocking write would hold up the process. */
function standardError() {
  const flags = constants.O_WRONLY | constants.O_NONBLOCK | constants.O_NOCTTY;
  // There may be no /proc, or no permission to open it.
  const reopened = isatty(STANDARD_ERROR) ? attempt(() => openSync("/proc/self/fd/2", flags)) : undefined;
  return (bytes: Uint8Array) => writeSync(reopened ?? STANDARD_ERROR, bytes);
}

/** Formats the current time by RFC 3339, at most once per millisecond. */
function timestamps(clock: Clock): () => string {
  let formattedAt = Number.NaN;
  let formatted = "";
  return () => {
    const now = clock.now();
    if (now !== formattedAt) [formattedAt, formatted] = [now, new Date(now).toISOString()];
    return formatted;
  };
}

function openSink(write: (bytes: Uint8Array) => number) {
  let lines: string[] = [];
  let characters = 0;
  let dropped = 0;
  let unwritten: Uint8Array = new Uint8Array();
  let timer: ReturnType<typeof setTimeout> | null = null;

  function flush(): void {
    if (timer !== null) clearTimeout(timer);
    timer = null;
    if (dropped > 0) lines.push(`{"level":"warn","event":"log_lines_dropped","count":${dropped}}\n`);
    dropped = 0;
    const added = Buffer.from(lines.join(""));
    const bytes = unwritten.length === 0 ? added : Buffer.concat([unwritten, added]);
    [lines, characters] = [[], 0];
    unwritten = bytes.subarray(writeAll(write, bytes));
    if (unwritten.length > 0) schedule();
  }

  function schedule(): void {
    // The timer does not keep the process alive: the exit handler writes what is left.
    timer ??= setTimeout(flush, 20).unref();
  }

  function add(line: string, isReserved: boolean): void {
    const most = isReserved ? MAX.logCharacters + RESERVED_CHARACTERS : MAX.logCharacters;
    if (characters + unwritten.length > most) {
      dropped++;
      return;
    }
    lines.push(line);
    characters += line.length;
    // While a slow reader has not taken the last bytes, a full buffer triggers no write: the timer tries again.
    if (characters >= FLUSH_AT_CHARACTERS && unwritten.length === 0) flush();
    else schedule();
  }

  return { add, flush };
}

/** Returns how many bytes are done with: either written, or lost to an error other than a slow reader. */
function writeAll(write: (bytes: Uint8Array) => number, bytes: Uint8Array): number {
  let done = 0;
  while (done < bytes.length) {
    try {
      done += write(bytes.subarray(done));
    } catch (error) {
      // A pipe with a slow reader takes more later. After any other error (closed pipe, full disk) the bytes are lost.
      return errorCode(error) === "EAGAIN" ? done : bytes.length;
    }
  }
  return done;
}

function jsonLine(time: string, level: LogLevel, event: string, fields: LogFields): string {
  const line = `{"time":"${time}","level":"${level}","event":${JSON.stringify(event)}`;
  const text = JSON.stringify(isPlain(fields) ? fields : bounded(fields));
  const shown = printableJson(text);
  return shown === "{}" ? `${line}}\n` : `${line},${shown.slice(1)}\n`;
}

/** Whether JSON.stringify alone formats all fields rightly, as for nearly every line. */
function isPlain(fields: LogFields): boolean {
  for (const name in fields) {
    const value = fields[name];
    if (value === null || typeof value === "boolean") continue;
    if (typeof value === "string" ? value.length > VALUE_CHARACTERS_MAX : !Number.isFinite(value)) return false;
  }
  return true;
}

const bounded = (fields: LogFields): object =>
  Object.fromEntries(Object.entries(fields).map(([name, value]) => [name, jsonValue(value)]));

/** A value of bounded length for JSON.stringify to format. Undefined, functions and symbols pass, and it leaves them out. */
function jsonValue(value: unknown): unknown {
  if (value instanceof Error) return describe(value);
  if (typeof value === "string") return cut(value);
  if (typeof value === "bigint" || (typeof value === "number" && !Number.isFinite(value))) return `${value}`;
  if (typeof value !== "object") return value;
  try {
    const shown = JSON.stringify(value);
    return shown.length > VALUE_CHARACTERS_MAX ? cut(shown) : value;
  } catch {
    return "unprintable";
  }
}

const cut = (value: string): string =>
  value.length > VALUE_CHARACTERS_MAX ? `${value.slice(0, VALUE_CHARACTERS_MAX)}…` : value;

function describe(error: Error) {
  const causes: string[] = [];
  for (let cause = error.cause; cause !== undefined && causes.length < 8; ) {
    causes.push(cut(summary(cause)));
    cause = cause instanceof Error ? cause.cause : undefined;
  }
  return { message: cut(summary(error)), causes, stack: cut(frames(error.stack ?? "")) };
}

function summary(value: unknown): string {
  if (!(value instanceof Error)) return String(value);
  const code = "code" in value && value.code !== undefined ? ` (${String(value.code)})` : "";
  return `${value.name}: ${value.message}${code}`;
}

/** The stack frames alone, since the message is printed separately. */
function frames(stack: string): string {
  const lines = stack.split("\n").flatMap((line) => (/^\s+at /.test(line) ? line.trim() : []));
  return lines.join("\n");
}

const COLOURS = { debug: 90, info: 32, warn: 33, error: 31 } as const;

function prettyLine(time: string, level: LogLevel, event: string, fields: LogFields): string {
  let line = `${time.slice(11, 23)} \x1b[${COLOURS[level]}m${level.padEnd(5)}\x1b[0m ${escaped(event)}`;
  let below = "";
  for (const name in fields) {
    const value = fields[name];
    if (value === undefined || typeof value === "function") continue;
    if (value instanceof Error) below += prettyError(describe(value));
    else line += ` \x1b[90m${escaped(name)}=\x1b[0m${escaped(prettyValue(value))}`;
  }
  return `${line}\n${below}`;
}

function prettyValue(value: unknown): string {
  if (typeof value === "string" && /^[^\s"=]+$/.test(value)) return cut(value);
  return JSON.stringify(jsonValue(value)) ?? "";
}

function prettyError({ message, causes, stack }: ReturnType<typeof describe>): string {
  const lines = [message, ...causes.map((cause) => `caused by ${cause}`), ...stack.split("\n")];
  return lines.map((line) => (line === "" ? "" : `    ${escaped(line)}\n`)).join("");
}

/** Escapes control characters, since values from outside must not control the terminal. */
function escaped(value: string): string {
  const shown = (character: string) => `\\u{${(character.codePointAt(0) ?? 0).toString(16)}}`;
  return value.replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, shown);
}
