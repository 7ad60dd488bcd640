// `tollgate pki`: a small private CA for mutual TLS with the facilitator, in a directory of its own (mode 0700, files 0600). It
// issues the CA's own certificate, the server's, and those of any number of clients (RFC 5280), all with EC P-256 keys, which
// every TLS implementation accepts. The command needs no configuration and no database. It never overwrites a file, since a
// lost CA key can't be recovered.
import { createPrivateKey, createPublicKey, X509Certificate } from "node:crypto";
import { mkdirSync, statSync, unlinkSync } from "node:fs";
import { isIP } from "node:net";
import { join } from "node:path";
import type { Extension, JsonGeneralName } from "@peculiar/x509";
import * as value from "../config/values.ts";
import { errorCode } from "../core/fault.ts";
import { StartupProblem } from "../core/startup.ts";
import { DAY_MS, HOUR_MS, systemClock } from "../core/time.ts";
import { placePrivateFile, syncToDisk } from "../storage/data-dir.ts";
import { type CommandLine, Misuse, neededFlag, shownWord } from "./command-line.ts";
import { programText, quoted } from "./program.ts";

// The X.509 library uses a container (tsyringe) that refuses to load without `Reflect.getMetadata`, a proposal that no runtime
// implements. Library and container ask these two functions only for metadata that decorators or a compiler have left on
// classes. The library's classes have none, so undefined is always right. The functions that store metadata are left out, so
// that a version which needs them fails at once.
if (!("getMetadata" in Reflect)) {
  const nothing = { value: () => undefined, configurable: true, writable: true };
  Object.defineProperties(Reflect, { getMetadata: nothing, getOwnMetadata: nothing });
}
// Not a static import, since those run before the lines above.
const x509 = await import("@peculiar/x509");

type WantedCertificate =
  | { readonly kind: "ca" }
  | { readonly kind: "server"; readonly hosts: readonly string[] }
  | { readonly kind: "client"; readonly name: string };

type PkiRequest = { readonly dir: string; readonly wanted: WantedCertificate };

/** A common name has at most 64 characters (RFC 5280, appendix A). The name also names the files of the client. */
const CLIENT_NAME = /^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$/;
const RESERVED_NAMES = ["ca", "server"];

const HOST_IS = "a host name (*.name too) or an IP address by which clients call the server";
const NAME_IS = `1 to 64 letters, digits, dots, hyphens and underscores, neither ${RESERVED_NAMES.join(" nor ")}`;

export function pki(line: CommandLine): Promise<string> {
  const request = readPkiRequest(line);
  if (line.problems.length > 0) throw new Misuse(line.problems);
  return runPki(request);
}

export function readPkiRequest(line: CommandLine): PkiRequest {
  const { command, problems } = line;
  const dir = neededFlag(line, "dir", "the directory of the CA");
  if (command === "pki init") return { dir, wanted: { kind: "ca" } };
  if (command === "pki server") return { dir, wanted: { kind: "server", hosts: readHosts(line) } };
  const name = neededFlag(line, "name", NAME_IS);
  const isGood = CLIENT_NAME.test(name) && !RESERVED_NAMES.includes(name.toLowerCase());
  if (name !== "" && !isGood) problems.push(`--name must be ${NAME_IS}`);
  return { dir, wanted: { kind: "client", name } };
}

function readHosts({ lists, problems }: CommandLine): readonly string[] {
  const given = lists.get("host") ?? [];
  if (given.length === 0) problems.push(`--host is missing: ${HOST_IS}; it may be given several times`);
  if (given.length > 100) problems.push("--host may be given at most 100 times");
  const hosts = given.map(readHost);
  const bad = given.find((_, index) => hosts[index] === undefined);
  if (bad !== undefined) problems.push(`--host must be ${HOST_IS}: ${JSON.stringify(shownWord(bad))} is neither`);
  return [...new Set(hosts.flatMap((host) => host ?? []))];
}

/** A host name, or an address in its shortest form, since the X.509 library misreads some of the longer forms. */
function readHost(given: string): string | undefined {
  const [, star = "", rest = ""] = /^(\*\.)?(.*)$/s.exec(given) ?? [];
  const host = value.host.parse(rest);
  if (host === undefined || (star !== "" && isIP(host) !== 0)) return undefined;
  return isIP(host) === 6 ? URL.parse(`http://[${host}]`)?.hostname.slice(1, -1) : star + host;
}

/** Issues a certificate, writes its files, and tells them. @throws StartupProblem for a missing CA, or a file that can't be made */
export async function runPki({ dir, wanted }: PkiRequest): Promise<string> {
  if (statSync(dir, { throwIfNoEntry: false })?.isDirectory() === false) {
    throw new StartupProblem(`--dir must be a directory, and ${dir} is a file`);
  }
  const { files, next } = await issueFiles(dir, wanted);
  const isShared = writeNew(dir, files);
  const written = Object.keys(files).map((name) => `wrote ${join(dir, name)}\n`);
  const open = isShared ? [`warning: other users can read ${dir}\n`] : [];
  return [...written, ...open, `next: ${programText()} ${next}\n`].join("");
}

/** The texts of the new files by name, each key before its certificate, and the next command. */
async function issueFiles(dir: string, wanted: WantedCertificate) {
  const now = systemClock.now();
  if (wanted.kind === "ca") {
    const { cert, key } = await issueCa(now);
    return { files: { "ca.key": key, "ca.crt": cert }, next: `pki server --dir ${quoted(dir)} --host HOST` };
  }
  const ca = readCa(dir, now);
  if (wanted.kind === "server") {
    const { cert, key } = await issueServer(ca, wanted.hosts, now);
    return { files: { "server.key": key, "server.crt": cert }, next: `pki client --dir ${quoted(dir)} --name NAME` };
  }
  const { name } = wanted;
  const { cert, key } = await issueClient(ca, name, now);
  return {
    files: { [`${name}.key`]: key, [`${name}.crt`]: cert, [`${name}.pem`]: cert + key + ca.cert },
    next: `account add ${name} --cert ${quoted(join(dir, `${name}.crt`))}`,
  };
}

function readCa(dir: string, now: number): CertifiedKey {
  const [certPath, keyPath] = [join(dir, "ca.crt"), join(dir, "ca.key")];
  const hint = `make the CA first, with ${programText()} pki init --dir ${quoted(dir)}`;
  const ca = { cert: readPem(certPath, hint), key: readPem(keyPath, hint) };
  const problem = caProblem(ca, now);
  if (problem === null) return ca;
  throw new StartupProblem(`${certPath} and ${keyPath} must be what pki init wrote: ${problem}`);
}

/** @throws StartupProblem when the file can't be read, or is too large */
function readPem(path: string, hint: string): string {
  try {
    return value.readTextFile(path);
  } catch (cause) {
    const next = errorCode(cause) === "ENOENT" ? `: ${hint}` : "";
    throw new StartupProblem(`${value.fileProblem(path, cause, true)}${next}`, { cause });
  }
}

/** Writes all files or none. @returns whether others can read the directory @throws StartupProblem when a file can't be made */
function writeNew(dir: string, files: Readonly<Record<string, string>>): boolean {
  const written: string[] = [];
  let at = dir;
  try {
    mkdirSync(dir, { recursive: true, mode: 0o700 });
    for (const [name, text] of Object.entries(files)) {
      at = join(dir, name);
      placePrivateFile(at, join(dir, `.${name}.${crypto.randomUUID()}`), text);
      written.push(at);
    }
    syncToDisk(dir);
    return (statSync(dir).mode & 0o077) !== 0;
  } catch (cause) {
    for (const path of written) unlinkSync(path);
    const unwritten = `can't be written: ${value.systemReason(cause)}`;
    const isTaken = errorCode(cause) === "EEXIST";
    throw new StartupProblem(`${at} ${isTaken ? "exists already, and no file is ever overwritten" : unwritten}`, {
      cause,
    });
  }
}

/** A certificate and its private key (PKCS #8), as PEM. */
type CertifiedKey = Readonly<Record<"cert" | "key", string>>;

const KEYS = { name: "ECDSA", namedCurve: "P-256" } as const;
const SIGNATURE = { name: "ECDSA", hash: "SHA-256" } as const;

/** How far certificates are backdated, since the clocks of two machines may differ. */
const BACKDATED_MS = HOUR_MS;
const CA_DAYS = 3_652;
/** A year, and a month to renew in. Some clients reject server certificates that are valid for more than 398 days. */
const LEAF_DAYS = 397;
/** Marks an extension that clients must understand, or else reject the certificate. */
const CRITICAL = true;

/** Issues a root certificate, which may sign certificates of servers and clients but no further CA. */
export function issueCa(now: number): Promise<CertifiedKey> {
  const serialNumber = newSerial();
  // The digits help people to tell two roots apart.
  return issue(null, `tollgate CA ${serialNumber.slice(0, 8)}`, [], now, serialNumber);
}

/** @param hosts all names and addresses by which clients call the server; addresses without brackets */
export function issueServer(ca: CertifiedKey, hosts: readonly string[], now: number): Promise<CertifiedKey> {
  const names = hosts.map((value): JsonGeneralName => ({ type: isIP(value) === 0 ? "dns" : "ip", value }));
  const extensions = [
    new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage.serverAuth]),
    new x509.SubjectAlternativeNameExtension(names),
  ];
  return issue(ca, "tollgate server", extensions, now);
}

export const issueClient = (ca: CertifiedKey, name: string, now: number): Promise<CertifiedKey> =>
  issue(ca, name, [new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage.clientAuth])], now);

/** @param ca null to issue a root, which signs itself */
async function issue(
  ca: CertifiedKey | null,
  name: string,
  purpose: readonly Extension[],
  now: number,
  serialNumber = newSerial(),
): Promise<CertifiedKey> {
  const isRoot = ca === null;
  const issuer = isRoot ? null : new x509.X509Certificate(ca.cert);
  const subject = [{ CN: [name] }];
  // A certificate must not outlive its CA.
  const lasts = issuer === null ? CA_DAYS * DAY_MS : Math.min(LEAF_DAYS * DAY_MS, issuer.notAfter.getTime() - now);
  const keys = await crypto.subtle.generateKey(KEYS, true, ["sign", "verify"]);
  const { digitalSignature, keyCertSign, cRLSign } = x509.KeyUsageFlags;
  const certificate = await x509.X509CertificateGenerator.create({
    subject,
    issuer: issuer?.subjectName ?? subject,
    serialNumber,
    notBefore: new Date(now - BACKDATED_MS),
    notAfter: new Date(now + lasts),
    publicKey: keys.publicKey,
    signingKey: isRoot ? keys.privateKey : await readSigningKey(ca.key),
    signingAlgorithm: SIGNATURE,
    extensions: [
      new x509.BasicConstraintsExtension(isRoot, isRoot ? 0 : undefined, CRITICAL),
      new x509.KeyUsagesExtension(isRoot ? keyCertSign | cRLSign : digitalSignature, CRITICAL),
      ...purpose,
      await x509.SubjectKeyIdentifierExtension.create(keys.publicKey),
      await x509.AuthorityKeyIdentifierExtension.create(issuer?.publicKey ?? keys.publicKey),
    ],
  });
  const pkcs8 = await crypto.subtle.exportKey("pkcs8", keys.privateKey);
  const key = `${x509.PemConverter.encode(pkcs8, x509.PemConverter.PrivateKeyTag)}\n`;
  return { cert: `${certificate.toString("pem")}\n`, key };
}

export function caProblem(ca: CertifiedKey, now: number): string | null {
  try {
    const certificate = new X509Certificate(ca.cert);
    const key = createPrivateKey(ca.key);
    if (!certificate.ca) return "the certificate is not a CA's";
    if (!certificate.checkPrivateKey(key)) return "the key does not belong to the certificate";
    if (createPublicKey(key).asymmetricKeyDetails?.namedCurve !== "prime256v1") return "the key is not P-256";
    return now < Date.parse(certificate.validTo) ? null : "the certificate has expired";
  } catch {
    return "they are not a certificate and its private key in PEM";
  }
}

/** 16 bytes with 126 random bits. The first two bits are fixed, so that the number is positive and never shorter. */
function newSerial(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[0] = ((bytes[0] ?? 0) & 0x3f) | 0x40;
  return bytes.toHex();
}

function readSigningKey(key: string): Promise<CryptoKey> {
  const der = createPrivateKey(key).export({ type: "pkcs8", format: "der" });
  return crypto.subtle.importKey("pkcs8", new Uint8Array(der), KEYS, false, ["sign"]);
}
