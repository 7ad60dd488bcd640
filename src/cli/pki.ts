// `tollgate pki`: a small private CA for the mutual-TLS side, in a directory of its own (0700, its files 0600): ca, then server
// and any number of clients. It needs no configuration and no database. No file ever replaces another, since a lost CA key
// can't be made again.

import { mkdirSync, readFileSync, statSync, unlinkSync } from "node:fs";
import { join } from "node:path";
import * as value from "../config/values.ts";
import { systemClock } from "../core/clock.ts";
import { StartupProblem } from "../core/startup.ts";
import { placePrivateFile, syncDirectory } from "../storage/private-file.ts";
import { type CertifiedKey, caProblem, issueCa, issueClient, issueServer } from "./certificates.ts";
import type { CommandLine } from "./command-line.ts";
import { programText, quoted, thisProgram } from "./program.ts";

export type PkiCommand = "pki init" | "pki server" | "pki client";

type WantedCertificate =
  | { readonly kind: "ca" }
  | { readonly kind: "server"; readonly hosts: readonly string[] }
  | { readonly kind: "client"; readonly name: string };

interface PkiRequest {
  readonly dir: string;
  readonly wanted: WantedCertificate;
}

/** A common name has at most 64 characters (RFC 5280, appendix A), and a file name is more than this one. */
const CLIENT_NAME = /^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$/;
/** The names of the other files. */
const TAKEN_NAMES = ["ca", "server"];
const HOSTS_MAX = 100;

const HOST_MUST =
  "--host must be given, once for each host name or IP address that the server is called by (*.name too)";
const NAME_MUST = `--name must be given: 1 to 64 letters, digits, dots, hyphens and underscores, neither ${TAKEN_NAMES.join(" nor ")}`;

type Flags = Pick<CommandLine, "flags" | "lists">;

/** The request that the flags make, or null and every problem that they have. */
export function readPkiRequest(
  command: PkiCommand,
  line: Flags,
): { readonly request: PkiRequest | null; readonly problems: readonly string[] } {
  const dir = value.path.parse(line.flags.get("dir") ?? "") || null;
  const { wanted, problem } = readWanted(command, line);
  const problems = [...(dir === null ? ["--dir must be given: the directory of the CA"] : []), ...problem];
  return { request: dir === null || wanted === null ? null : { dir, wanted }, problems };
}

function readWanted(
  command: PkiCommand,
  { flags, lists }: Flags,
): { readonly wanted: WantedCertificate | null; readonly problem: readonly string[] } {
  switch (command) {
    case "pki init":
      return { wanted: { kind: "ca" }, problem: [] };
    case "pki server": {
      const hosts = readHosts(lists.get("host") ?? []);
      return hosts === null
        ? { wanted: null, problem: [HOST_MUST] }
        : { wanted: { kind: "server", hosts }, problem: [] };
    }
    case "pki client": {
      const name = readName(flags.get("name") ?? "");
      return name === null ? { wanted: null, problem: [NAME_MUST] } : { wanted: { kind: "client", name }, problem: [] };
    }
  }
}

function readHosts(given: readonly string[]): readonly string[] | null {
  const hosts = given.map(readHost);
  const good = hosts.flatMap((host) => host ?? []);
  if (good.length < hosts.length || good.length === 0 || good.length > HOSTS_MAX) return null;
  return [...new Set(good)];
}

/** An address in its shortest form, since the X.509 library reads some of the others wrong. */
function readHost(given: string): string | undefined {
  const [, star = "", rest = ""] = /^(\*\.)?(.*)$/s.exec(given) ?? [];
  const host = value.host.parse(rest);
  if (host === undefined || !host.includes(":")) {
    return host === undefined || (star !== "" && /^[\d.]+$/.test(host)) ? undefined : star + host;
  }
  const url = star === "" && URL.canParse(`http://[${host}]`) ? new URL(`http://[${host}]`) : null;
  return url?.hostname.slice(1, -1);
}

function readName(given: string): string | null {
  return CLIENT_NAME.test(given) && !TAKEN_NAMES.includes(given.toLowerCase()) ? given : null;
}

/**
 * @returns what to tell: the files that were written and the command that comes next
 * @throws StartupProblem when there is no CA, or a file is there already or can't be written
 */
export async function runPki({ dir, wanted }: PkiRequest): Promise<string> {
  const files = await makeFiles(dir, wanted);
  const { shared } = writeNew(dir, files);
  const written = Object.keys(files).map((name) => `wrote ${join(dir, name)}\n`);
  const open = shared ? [`mind: ${dir} is open to others than its owner\n`] : [];
  return [...written, ...open, `next: ${nextStep(dir, wanted)}\n`].join("");
}

/** By name. A key comes before its certificate, which is what people look for. */
async function makeFiles(dir: string, wanted: WantedCertificate): Promise<Readonly<Record<string, string>>> {
  const now = systemClock.now();
  if (wanted.kind === "ca") {
    const { cert, key } = await issueCa(now);
    return { "ca.key": key, "ca.crt": cert };
  }
  const ca = readCa(dir, now);
  if (wanted.kind === "server") {
    const { cert, key } = await issueServer(ca, wanted.hosts, now);
    return { "server.key": key, "server.crt": cert };
  }
  const { name } = wanted;
  const { cert, key } = await issueClient(ca, name, now);
  return { [`${name}.key`]: key, [`${name}.crt`]: cert, [`${name}.pem`]: cert + key + ca.cert };
}

function readCa(dir: string, now: number): CertifiedKey {
  const [certPath, keyPath] = [join(dir, "ca.crt"), join(dir, "ca.key")];
  const hint = "make a CA with pki init first";
  const ca = { cert: readPem(certPath, hint), key: readPem(keyPath, hint) };
  const problem = caProblem(ca, now);
  if (problem === null) return ca;
  throw new StartupProblem(`${certPath} and ${keyPath} must be what pki init wrote: ${problem}`);
}

function nextStep(dir: string, wanted: WantedCertificate): string {
  const tollgate = programText(thisProgram());
  switch (wanted.kind) {
    case "ca":
      return `${tollgate} pki server --dir ${quoted(dir)} --host HOST`;
    case "server":
      return `${tollgate} pki client --dir ${quoted(dir)} --name NAME`;
    case "client": {
      const { name } = wanted;
      return `${tollgate} account add ${name} --cert ${quoted(join(dir, `${name}.crt`))}`;
    }
  }
}

const FILE_BYTES_MAX = 65_536;

/** @throws StartupProblem when it can't be read, or is too large to be such a file */
function readPem(path: string, hint: string): string {
  try {
    if (statSync(path).size <= FILE_BYTES_MAX) return readFileSync(path, "utf8");
  } catch (cause) {
    throw new StartupProblem(`${path} must be readable${codeIn(cause)}: ${hint}`, { cause });
  }
  throw new StartupProblem(`${path} must be a PEM file of at most ${FILE_BYTES_MAX} bytes`);
}

/**
 * Writes all of them or none.
 *
 * @param files texts by name
 * @returns whether others than the owner may look into the directory
 * @throws StartupProblem when one is there already or can't be written
 */
function writeNew(dir: string, files: Readonly<Record<string, string>>): { readonly shared: boolean } {
  const written: string[] = [];
  let at = dir;
  try {
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    for (const [name, text] of Object.entries(files)) {
      at = join(dir, name);
      placePrivateFile(at, join(dir, `.${name}.${crypto.randomUUID()}`), text);
      written.push(at);
    }
    syncDirectory(dir);
    return { shared: (statSync(dir).mode & 0o077) !== 0 };
  } catch (cause) {
    for (const path of written) unlinkSync(path);
    const isTaken = codeOf(cause) === "EEXIST" && at !== dir;
    const problem = isTaken ? "is there already, and nothing is ever written over" : `must be writable${codeIn(cause)}`;
    throw new StartupProblem(`${at} ${problem}`, { cause });
  }
}

function codeOf(cause: unknown): string | null {
  return cause instanceof Error && "code" in cause ? String(cause.code) : null;
}

function codeIn(cause: unknown): string {
  const code = codeOf(cause);
  return code === null ? "" : ` (${code})`;
}
