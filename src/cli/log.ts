// The log on standard error: one line an event, as JSON or for a terminal. Lines are collected and written
// together, since a system call per line would be expensive on the accept path. The rest is written when the process
// exits. A log that can't be written never stops the product: lines are dropped and counted.
import { constants, openSync, writeSync } from "node:fs";
import { isatty } from "node:tty";
import { LOG_LEVELS, type LogFields, type LogLevel } from "../core/log.ts";
import type { Clock } from "../core/time.ts";
import { MAX } from "../kernel/limits.ts";

const STANDARD_ERROR = 2;
/** Below the 64 KiB of an empty pipe. At 16 KiB an accept on SQLite took 3 % more of the main thread (measured). */
const FLUSH_AT_CHARACTERS = 49_152;
/** Extra space for warnings and errors, so that none is dropped because of many lines at lower levels. */
const RESERVED_CHARACTERS = 4_194_304;
const VALUE_CHARACTERS_MAX = 4096;

export interface LogOptions {
  readonly level: LogLevel;
  readonly format: "json" | "pretty";
  readonly clock: Clock;
  /** Takes what it can of the bytes and returns how many; throws when it can take none. For tests. */
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

/** `flush` writes what is held now. It is called at exit too. */
export type OpenLog = ReturnType<typeof openLog>;

/** Reopens a terminal in non-blocking mode: once its reader stops (Ctrl-S), a blocking write would hold up the process. */
function standardError() {
  const { O_WRONLY, O_NONBLOCK, O_NOCTTY } = constants;
  let descriptor = STANDARD_ERROR;
  try {
    if (isatty(STANDARD_ERROR)) descriptor = openSync("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY);
  } catch {
    // There is no /proc, or it may not be opened.
  }
  return (bytes: Uint8Array) => writeSync(descriptor, bytes);
}

/** The time as RFC 3339 has it, written once a millisecond. */
function timestamps(clock: Clock): () => string {
  let madeAt = Number.NaN;
  let made = "";
  return () => {
    const now = clock.now();
    if (now !== madeAt) [madeAt, made] = [now, new Date(now).toISOString()];
    return made;
  };
}

function openSink(write: (bytes: Uint8Array) => number) {
  let lines: string[] = [];
  let characters = 0;
  let dropped = 0;
  let rest: Uint8Array = new Uint8Array();
  let timer: ReturnType<typeof setTimeout> | null = null;

  function flush(): void {
    if (timer !== null) clearTimeout(timer);
    timer = null;
    if (dropped > 0) lines.push(`{"level":"warn","event":"log_lines_dropped","count":${dropped}}\n`);
    dropped = 0;
    const added = Buffer.from(lines.join(""));
    const bytes = rest.length === 0 ? added : Buffer.concat([rest, added]);
    [lines, characters] = [[], 0];
    rest = bytes.subarray(writeAll(write, bytes));
    if (rest.length > 0) schedule();
  }

  function schedule(): void {
    // The timer keeps no process alive: the exit handler writes what it would have written.
    timer ??= setTimeout(flush, 20).unref();
  }

  function add(line: string, isReserved: boolean): void {
    const most = isReserved ? MAX.logCharacters + RESERVED_CHARACTERS : MAX.logCharacters;
    if (characters + rest.length > most) {
      dropped++;
      return;
    }
    lines.push(line);
    characters += line.length;
    // A reader that is too slow for what is held already is asked again by the timer only.
    if (characters >= FLUSH_AT_CHARACTERS && rest.length === 0) flush();
    else schedule();
  }

  return { add, flush };
}

/** Returns how many bytes are done: written, or lost because the reader has gone. */
function writeAll(write: (bytes: Uint8Array) => number, bytes: Uint8Array): number {
  let done = 0;
  while (done < bytes.length) {
    try {
      done += write(bytes.subarray(done));
    } catch (error) {
      // A pipe whose reader is slow takes more later; anything else (closed, full disk) will not get better.
      return error instanceof Error && "code" in error && error.code === "EAGAIN" ? done : bytes.length;
    }
  }
  return done;
}

function jsonLine(time: string, level: LogLevel, event: string, fields: LogFields): string {
  let line = `{"time":"${time}","level":"${level}","event":${JSON.stringify(event)}`;
  if (isPlain(fields)) {
    const shown = JSON.stringify(fields);
    return shown === "{}" ? `${line}}\n` : `${line},${shown.slice(1)}\n`;
  }
  for (const name in fields) {
    const shown = toJson(fields[name]);
    if (shown !== undefined) line += `,${JSON.stringify(name)}:${shown}`;
  }
  return `${line}}\n`;
}

/** Whether JSON.stringify prints all fields as they must be printed, as in nearly every line. */
function isPlain(fields: LogFields): boolean {
  for (const name in fields) {
    const value = fields[name];
    if (value === null || typeof value === "boolean") continue;
    if (typeof value === "string" ? value.length > VALUE_CHARACTERS_MAX : !Number.isFinite(value)) return false;
  }
  return true;
}

/** Undefined for what is left out of a line: undefined itself, and functions. */
function toJson(value: unknown): string | undefined {
  switch (typeof value) {
    case "string":
      return JSON.stringify(cut(value));
    case "number":
    case "boolean":
      return Number.isFinite(value) || typeof value === "boolean" ? String(value) : `"${value}"`;
    case "bigint":
      return `"${value}"`;
    case "object":
      return value instanceof Error ? JSON.stringify(describe(value)) : objectToJson(value);
    default:
      return undefined;
  }
}

function objectToJson(value: object | null): string {
  try {
    const shown = JSON.stringify(value);
    return shown.length > VALUE_CHARACTERS_MAX ? JSON.stringify(cut(shown)) : shown;
  } catch {
    return '"unprintable"';
  }
}

function cut(value: string): string {
  return value.length > VALUE_CHARACTERS_MAX ? `${value.slice(0, VALUE_CHARACTERS_MAX)}…` : value;
}

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

/** The stack without the message, which is printed already. */
function frames(stack: string): string {
  return stack
    .split("\n")
    .filter((line) => /^\s+at /.test(line))
    .map((line) => line.trim())
    .join("\n");
}

const COLOURS = { debug: 90, info: 32, warn: 33, error: 31 } as const;

function prettyLine(time: string, level: LogLevel, event: string, fields: LogFields): string {
  let line = `${time.slice(11, 23)} \x1b[${COLOURS[level]}m${level.padEnd(5)}\x1b[0m ${printable(event)}`;
  let below = "";
  for (const name in fields) {
    const value = fields[name];
    if (value === undefined || typeof value === "function") continue;
    if (value instanceof Error) below += prettyError(describe(value));
    else line += ` \x1b[90m${printable(name)}=\x1b[0m${printable(prettyValue(value))}`;
  }
  return `${line}\n${below}`;
}

function prettyValue(value: unknown): string {
  if (typeof value === "string" && /^[^\s"=]+$/.test(value)) return cut(value);
  return toJson(value) ?? "";
}

function prettyError({ message, causes, stack }: ReturnType<typeof describe>): string {
  const lines = [message, ...causes.map((cause) => `caused by ${cause}`), ...stack.split("\n")];
  return lines
    .filter((line) => line !== "")
    .map((line) => `    ${printable(line)}\n`)
    .join("");
}

/** A value from outside must not steer the terminal. */
function printable(value: string): string {
  return value.replace(
    /[\p{Cc}\p{Cf}\u2028\u2029]/gu,
    (character) => `\\u{${(character.codePointAt(0) ?? 0).toString(16)}}`,
  );
}
