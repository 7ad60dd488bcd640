// The kinds of values that variables have, each a parser with a sentence for the operator. A problem never repeats the value,
// since a mistyped secret is still a secret. Amounts are exact integers, and hex is normalised to lower case.
import { accessSync, closeSync, constants, existsSync, openSync, readSync, type Stats, statSync } from "node:fs";
import { isIP } from "node:net";
import { dirname, resolve } from "node:path";
import type { Hex } from "../core/bytes.ts";
import { attempt, errorCode } from "../core/fault.ts";
import { parseHostList, urlMeant } from "../core/host.ts";
import { didYouMean, printable } from "../core/text.ts";
import { lowerHex, parseUint256 } from "../x402/types.ts";

export interface Kind<T> {
  /** Completes "NAME must be …". */
  readonly must: string;
  /** Returns undefined when the text is not valid. The text is never empty. */
  readonly parse: (text: string) => T | undefined;
  /** Why a text is not valid, or "" where no more can be said. The value of a flag may be shown, since it was typed in its place. */
  readonly why?: (text: string, isFlag: boolean) => string;
}

export function valueProblem(source: string, { must, why }: Pick<Kind<unknown>, "must" | "why">, text: string): string {
  const reason = why?.(text, source.startsWith("--")) ?? "";
  return `${source} must be ${must}${reason === "" ? "" : `: ${reason}`}`;
}

/** Why a file was not read, after its path. */
class Unreadable extends Error {}

export function fileProblem(path: string, error: unknown, isFlag = false, kind: "file" | "directory" = "file"): string {
  const shown = isFlag ? resolve(path) : writtenPath(path, kind);
  if (error instanceof Unreadable) return `${shown} ${error.message}`;
  if (errorCode(error) !== "ENOENT") return `${shown} can't be read: ${systemReason(error)}`;
  return `${shown} does not exist${shown === `that ${kind}` ? ` in ${process.cwd()}` : ""}`;
}

/** The words and the code of an error of the system, like "permission denied (EACCES)". */
export function systemReason(error: unknown): string {
  const code = errorCode(error);
  if (!(error instanceof Error) || code === null) return "unknown reason";
  const words = /^[A-Z]+: ([^,]+)/.exec(error.message)?.[1];
  return words === undefined ? code : `${words} (${code})`;
}

/** More than any certificate, key set or file of variables has. */
export const FILE_BYTES_MAX = 4 * 1024 * 1024;
const PIPE_MS_MAX = 10_000;

/**
 * The text of a file that an operator has named, or what comes through a pipe (a secret passed as /dev/fd/3) to its end. A device is
 * refused, since some never end, and so is a pipe that nobody writes to. @throws an error for `fileProblem`
 */
export const readTextFile = (path: string, bytesMax = FILE_BYTES_MAX): string =>
  readBytesFile(path, bytesMax).toString("utf8");

/** As `readTextFile`, without decoding. */
export function readBytesFile(path: string, bytesMax: number): Buffer {
  const about = statSync(path);
  if (about.isDirectory()) throw new Unreadable("is a directory");
  if (!about.isFile() && !about.isFIFO()) throw new Unreadable("is neither a file nor a pipe");
  // Without O_NONBLOCK the opening of a pipe waits for its writer.
  const file = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
  try {
    return readToEnd(file, about, bytesMax);
  } finally {
    closeSync(file);
  }
}

function readToEnd(file: number, about: Stats, bytesMax: number): Buffer {
  const until = performance.now() + PIPE_MS_MAX;
  const chunks: Buffer[] = [];
  let length = 0;
  for (;;) {
    const chunk = Buffer.alloc(65_536);
    const count = readNow(file, chunk);
    // A pipe from which nothing has come may have no writer yet.
    if (count === 0 && (length > 0 || about.isFile())) return Buffer.concat(chunks);
    chunks.push(chunk.subarray(0, count ?? 0));
    length += count ?? 0;
    if (length > bytesMax) throw new Unreadable(`is larger than ${bytesMax} bytes`);
    if (count) continue;
    const unwritten = `is a pipe that nobody has written to in ${PIPE_MS_MAX / 1000} s`;
    if (performance.now() > until) throw new Unreadable(unwritten);
    Bun.sleepSync(5);
  }
}

/** @returns how many bytes were read; null when a pipe has none now, but may have later */
function readNow(file: number, chunk: Buffer): number | null {
  try {
    return readSync(file, chunk);
  } catch (error) {
    if (errorCode(error) === "EAGAIN") return null;
    throw error;
  }
}

/** A text that is taken as it is, unless `problem` says why it is not valid. */
function unless(must: string, problem: (text: string) => string | null): Kind<string> {
  const parse = (text: string) => (problem(text) === null ? text : undefined);
  return { must, parse, why: (text) => problem(text) ?? "" };
}

/** A text that begins like a path, and is no key in base64, which may begin with a slash too. */
const PATH_LIKE = /^(?![A-Za-z0-9+/]{40,}=*$)(~|\.{0,2})\//;

/** The path as problems show it. A text that is no path may be a secret in the wrong variable, and is never shown. */
export function writtenPath(path: string, kind: "file" | "directory" = "file"): string {
  const dir = dirname(path);
  const isLikePath = PATH_LIKE.test(path) || /\.\w{1,5}$/.test(path);
  return isLikePath || existsSync(path) || (dir.length > 1 && existsSync(dir)) ? resolve(path) : `that ${kind}`;
}

export function wholeNumber(least: number, most: number): Kind<number> {
  return {
    must: `a whole number from ${least} to ${most}`,
    parse: (text) => {
      const value = /^\d{1,16}$/.test(text) ? Number(text) : Number.NaN;
      return value >= least && value <= most ? value : undefined;
    },
  };
}

export function choice<const T extends string>(words: readonly T[]): Kind<T> {
  const none = words.length === 2 ? "neither" : "none";
  return {
    must: words.join(", ").replace(/, ([^,]*)$/, " or $1"),
    parse: (text) => words.find((word) => word === text),
    why: (text, isFlag) => (isFlag ? `${printable(text.slice(0, 40))} is ${none}${didYouMean(text, words)}` : ""),
  };
}

/** A text that is taken as it is if the whole of it matches. */
function matching(must: string, pattern: RegExp): Kind<string> {
  return { must, parse: (text) => (pattern.test(text) ? text : undefined) };
}

export const text = matching("a text without control characters", /^\P{Cc}*$/u);
export const path = matching("a path", /^[^\0]*$/);

const NAME = /^(?=.{1,253}$)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*$/;

/** A host name in lower case or an address without brackets. */
function parseHost(value: string): string | undefined {
  const bare = /^\[(.*)\]$/.exec(value)?.[1];
  if (bare !== undefined) return isIP(bare) === 6 ? bare : undefined;
  if (isIP(value) !== 0) return value;
  const name = value.toLowerCase().replace(/\.$/, "");
  // URL parsers read a name that ends in a number as an IPv4 address, so it is not a valid name.
  return NAME.test(name) && !/(^|\.)(\d+|0x[0-9a-f]*)$/.test(name) ? name : undefined;
}

export const host: Kind<string> = { must: "a host name or an IP address", parse: parseHost };

/** URL parsers take names with other characters too, which no DNS name has. */
const isHostEntry = (entry: string) =>
  attempt(() => [...parseHostList([entry]).names].every((name) => NAME.test(name))) === true;

/** The entries as they were written, checked by the parser of the host rules. */
export const hostList: Kind<readonly string[]> = {
  must: "a comma-separated list of at most 1000 host names, addresses and CIDR ranges, without ports",
  parse: (value) => parsedEntries(value, 1000, (entry) => (isHostEntry(entry) ? entry : undefined)),
  why: (value) => hostProblem(listed(value), isHostEntry, 1000),
};

function parseUrl(value: string, protocols: readonly string[]): URL | undefined {
  const url = URL.parse(value);
  return url !== null && protocols.includes(url.protocol) ? url : undefined;
}

/** The URL as it was written, since an issuer is compared with claims character by character. */
export function httpUrl(parts: "query" | "no query"): Kind<string> {
  return {
    must: `an http or https URL with a host and without user information${parts === "query" ? "" : ", query"} or fragment`,
    parse: (value) => {
      const url = parseUrl(value, ["http:", "https:"]);
      if (url === undefined || /[#\s]/.test(value) || url.username + url.password !== "") return undefined;
      return parts === "query" || !value.includes("?") ? value : undefined;
    },
    why: (value, isFlag) => (isFlag && urlMeant(value)) || "",
  };
}

const SSL_MODES = ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"];

const ONE_HOST = "it must name one host, that of the primary (see Failover in tollgate help replicas)";

/** Why the database client would not take a URL, which it would say by an exception in its own words; null if it takes it. */
function postgresProblem(value: string): string | null {
  // Several hosts are no host that URL parsing knows, when each has a port.
  if (/^[^/?]*\/\/[^/?]*,/.test(value)) return ONE_HOST;
  const url = parseUrl(value, ["postgres:", "postgresql:"]);
  if (url === undefined) return "it is not a URL that begins with postgres:// or postgresql://";
  if (url.hostname === "" || /[%,]/.test(url.hostname) || url.port === "0") return ONE_HOST;
  // The client silently ignores this parameter.
  if (url.searchParams.has("target_session_attrs")) return `target_session_attrs is not supported: ${ONE_HOST}`;
  const modes = url.searchParams.getAll("sslmode").map((mode) => mode.toLowerCase());
  if (!modes.every((mode) => SSL_MODES.includes(mode))) return `its sslmode must be one of ${SSL_MODES.join(", ")}`;
  const prepares = url.searchParams.getAll("prepare");
  if (!prepares.every((prepare) => ["true", "false"].includes(prepare))) return "its prepare must be true or false";
  const parts = attempt(() => [url.username, url.password, url.pathname].map(decodeURIComponent));
  return parts === undefined ? "its user, password and database must be percent-encoded" : null;
}

const isOrigin = (entry: string) => URL.parse(entry)?.origin === entry;
const originsIn = (text: string) => text.split(",").map((each) => each.trim());

export const origins: Kind<readonly string[]> = {
  must: "a comma-separated list of web origins, such as https://app.example.com",
  parse: (text) => {
    const origins = originsIn(text);
    return origins.every(isOrigin) ? origins : undefined;
  },
  why: (text) => hostProblem(originsIn(text), isOrigin, Number.POSITIVE_INFINITY),
};

export const postgresUrl = unless("a URL like postgres://user:password@host:5432/database", postgresProblem);

export const key: Kind<Buffer> = {
  must: "32 bytes in base64 (openssl rand -base64 32)",
  // The padding may be missing.
  parse: (value) => (/^[A-Za-z0-9+/]{43}=?$/.test(value) ? Buffer.from(value, "base64") : undefined),
};

export const directory = unless("the path of a readable directory", (path) => {
  try {
    accessSync(path, constants.R_OK | constants.X_OK);
    return statSync(path).isDirectory() ? null : `${writtenPath(path)} is not a directory`;
  } catch (error) {
    return fileProblem(path, error, false, "directory");
  }
});

const SEGMENT = /^(?!\.{1,2}$)[A-Za-z0-9._~-]+$/;

/** `{tenant}` must be a segment of its own, since otherwise one tenant's references would reach another's secrets. */
export const tenantPrefix: Kind<string> = {
  must: "a path like secret/data/tenants/{tenant}: plain segments, one of them {tenant}",
  parse: (value) => {
    const segments = value.split("/");
    const tenants = segments.filter((segment) => segment === "{tenant}").length;
    const plain = segments.filter((segment) => SEGMENT.test(segment)).length;
    return tenants === 1 && plain === segments.length - 1 ? value : undefined;
  },
};

/** RFC 6749, section 3.3. */
const SCOPE = /^[\x21\x23-\x5B\x5D-\x7E]{1,256}$/;
export const scope = matching("one scope: visible ASCII without blanks, quotes and backslashes", SCOPE);

const REGISTERED = ["iss", "aud", "exp", "nbf", "iat", "jti"];

export const claimName: Kind<string> = {
  must: `a claim name, and none of ${REGISTERED.join(", ")}`,
  parse: (value) => (REGISTERED.includes(value) ? undefined : text.parse(value)),
};

const PAIRS_MAX = 64;
const PAIR_NAME = /^[!#$%&'*+.^_`|~\w-]{1,256}$/;

type NamedValue = readonly [name: string, value: string];

/** The list format of W3C baggage, which OpenTelemetry uses. */
function pairList(must: string, takes: (value: string) => boolean): Kind<readonly NamedValue[]> {
  const parseOne = (entry: string): NamedValue | undefined => {
    const [, name = "", written = ""] = /^\s*([^=\s]+)\s*=\s*(.*?)\s*$/.exec(entry) ?? [];
    const value = attempt(() => decodeURIComponent(written));
    return PAIR_NAME.test(name) && value !== undefined && takes(value) ? [name, value] : undefined;
  };
  return {
    must,
    parse: (text) => parsedEntries(text, PAIRS_MAX, parseOne),
    why: (text) => entryProblem(listed(text), (entry) => parseOne(entry) !== undefined, PAIRS_MAX),
  };
}

export const pairs = pairList(
  `a comma-separated list of at most ${PAIRS_MAX} name=value, values percent-encoded`,
  (value) => text.parse(value) !== undefined,
);

const isHeaderValue = (value: string) => /^[\t\x20-\x7e\x80-\xff]*$/.test(value);
const headerValues = pairList(`${pairs.must}, that can stand in HTTP headers`, isHeaderValue);

export const headerPairs: Kind<readonly NamedValue[]> = {
  ...headerValues,
  parse: (text) => headerValues.parse(text)?.map(([name, value]) => [name.toLowerCase(), value] as const),
};

export const ratio: Kind<number> = {
  must: "a number from 0 to 1",
  parse: (text) => (/^(0(\.\d{1,15})?|1(\.0{1,15})?)$/.test(text) ? Number(text) : undefined),
};

export const bearerToken: Kind<string> = {
  must: "a token, as tollgate token prints it",
  parse: (text) => (/^[\w-]+\.[\w-]+\.[\w-]+$/.test(text) ? text : undefined),
  why(text) {
    if (/^(\S+ )?bearer /i.test(text)) return "leave out the word Bearer before it";
    if (text === "") return "it is empty";
    return /^[\x21-\x7e]+$/.test(text)
      ? "it does not have the three parts of a token, in base64url with dots between them"
      : "it has a blank or another character that no token has";
  },
};

/** A file with a secret that only its owner may use, less one line end. A flag names it, so its path may be shown. */
export function secretFile<T>({ must, parse, why }: Kind<T>): Kind<T> {
  const read = (path: string) => readTextFile(path, 65_536).replace(/\r?\n$/, "");
  const openTo = (path: string) => {
    const about = statSync(path);
    if (!about.isFile()) return "is not a regular file";
    return (about.mode & 0o077) === 0 ? null : "is open to other users";
  };
  return {
    must: `a file readable only by its owner (chmod 600), containing ${must}`,
    parse: (path) => attempt(() => (openTo(path) === null ? parse(read(path)) : undefined)),
    why(path) {
      try {
        const problem = openTo(path);
        if (problem !== null) return `${resolve(path)} ${problem}`;
        return `${resolve(path)} does not contain one${why === undefined ? "" : `: ${why(read(path), false)}`}`;
      } catch (error) {
        return fileProblem(path, error, true);
      }
    },
  };
}

/** An amount in smallest units of the token, or in wei. */
export const amount: Kind<bigint> = {
  must: "a whole number of at most 256 bits, in decimal digits only",
  parse: (text) => parseUint256(text) ?? undefined,
};

/** A decimal number with at most six digits before the point, parsed exactly to the unit that its last digit stands for. */
function decimal(digits: number, what: string, least: bigint): Kind<bigint> {
  const pattern = new RegExp(`^([0-9]{1,6})(?:\\.([0-9]{1,${digits}}))?$`);
  return {
    must: `a decimal number of ${what}, like 5 or 0.5 and not .5, with 1 to 6 digits before the point and at most ${digits} after it`,
    parse: (text) => {
      const [, whole, fraction = ""] = pattern.exec(text) ?? [];
      const units = whole === undefined ? -1n : BigInt(whole + fraction.padEnd(digits, "0"));
      return units >= least ? units : undefined;
    },
  };
}

export const gwei = decimal(9, "gwei above 0", 1n);

/** An amount of USDC in its smallest units. */
export const usdcAmount = decimal(6, "USDC", 0n);

const KEYS_MAX = 64;
/** The group order of secp256k1 (SEC 2, section 2.4.1). A private key is below it, and not 0. */
const SECP256K1_ORDER = 0xffffffff_ffffffff_ffffffff_fffffffe_baaedce6_af48a03b_bfd25e8c_d0364141n;

export const privateKey: Kind<Hex> = { must: "one 32-byte hex private key (secp256k1)", parse: parsePrivateKey };

function parsePrivateKey(text: string): Hex | undefined {
  const digits = /^(?:0x)?([0-9a-f]{64})$/i.exec(text)?.[1]?.toLowerCase();
  if (digits === undefined) return undefined;
  const scalar = BigInt(`0x${digits}`);
  return scalar > 0n && scalar < SECP256K1_ORDER ? `0x${digits}` : undefined;
}

const listed = (text: string): readonly string[] => text.split(",").flatMap((entry) => entry.trim() || []);

/** Undefined when there are more than `most` entries, or one of them is not valid. */
function parsedEntries<T>(text: string, most: number, parse: (entry: string) => T | undefined) {
  const parsed = listed(text).map(parse);
  const valid = parsed.filter((entry) => entry !== undefined);
  return valid.length === parsed.length && valid.length <= most ? valid : undefined;
}

/** Names the first entry that is not valid by its position, since the entry itself may be a secret. */
function entryProblem(entries: readonly string[], isValid: (entry: string) => boolean, most: number, shown = "") {
  const at = entries.findIndex((entry) => !isValid(entry));
  if (at >= 0) return `entry ${at + 1} of ${entries.length}${shown} is not valid`;
  return entries.length > most ? `it has ${entries.length} entries` : "it has no entry";
}

/** Only a text that looks like a host is shown: a secret that was set in the wrong variable does not. */
const HOST_LIKE = /^(\*|(?=.*[.:])[\w.:/[\]*-]{1,60})$/;

function hostProblem(entries: readonly string[], isValid: (entry: string) => boolean, most: number): string {
  const bad = entries.find((entry) => !isValid(entry)) ?? "";
  const [strange] = /[^\w.:/[\]*-]/u.exec(bad) ?? [];
  const hint = strange === undefined ? "" : `, with ${JSON.stringify(strange)} in it,`;
  return entryProblem(entries, isValid, most, HOST_LIKE.test(bad) ? ` (${bad})` : hint);
}

/** A list of different entries, all of which are parsed: if an invalid key were skipped silently, nobody would watch its money. */
function listOf<T extends string>(must: string, most: number, parse: Kind<T>["parse"]): Kind<readonly T[]> {
  return {
    must,
    parse: (text) => {
      const parsed = parsedEntries(text, most, parse) ?? [];
      return parsed.length > 0 && new Set(parsed).size === parsed.length ? parsed : undefined;
    },
    why: (text) => {
      const entries = listed(text);
      const parsed = entries.map(parse);
      const again = parsed.findIndex((entry, at) => entry !== undefined && parsed.indexOf(entry) < at);
      const isWhole = !parsed.includes(undefined);
      return isWhole && again >= 0
        ? `entry ${again + 1} of ${entries.length} equals entry ${parsed.indexOf(parsed[again]) + 1}`
        : entryProblem(entries, (entry) => parse(entry) !== undefined, most);
    },
  };
}

export const privateKeys = listOf(
  `a comma-separated list of 1 to ${KEYS_MAX} different private keys of secp256k1, each 32 bytes in hex`,
  KEYS_MAX,
  parsePrivateKey,
);

const URLS_MAX = 16;

export const rpcUrls = listOf(
  `a comma-separated list of 1 to ${URLS_MAX} different http or https URLs without user information and fragment`,
  URLS_MAX,
  httpUrl("query").parse,
);

export const address: Kind<Hex> = {
  must: "an address: 0x and 40 hex digits",
  parse: (text) => (/^0x(?!0+$)[0-9a-f]{40}$/i.test(text) ? lowerHex(text) : undefined),
};
