// `tollgate pki`: a small private CA for the mutual-TLS side, in a directory of its own: ca, then server and any
// number of clients. It needs no configuration and no database.
import { join } from "node:path";
import * as value from "../config/values.ts";
import { systemClock } from "../core/clock.ts";
import { StartupProblem } from "../core/startup.ts";
import type { CommandLine } from "./command-line.ts";
import { readPem, writeNew } from "./pki/files.ts";
import { type CertifiedKey, caProblem, issueCa, issueClient, issueServer } from "./pki/issue.ts";
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
