// Variables that name PEM files. The files are read with the configuration, so that a wrong one is reported at the start and not
// in the first handshake; those of the mutual-TLS port are reread periodically while it runs. Their content is never shown.
import { createPrivateKey, X509Certificate } from "node:crypto";
import { readFile, stat } from "node:fs/promises";
import { resolve } from "node:path";
import { parseCertificates } from "../core/certificates.ts";
import { attempt } from "../core/fault.ts";
import { systemClock } from "../core/time.ts";
import { FILE_BYTES_MAX, fileProblem, readTextFile, valueProblem, writtenPath } from "./values.ts";

const PRIVATE_KEY = /-----BEGIN ((?:RSA |EC )?PRIVATE KEY)-----[^-]+-----END \1-----/g;

/** Why a file is refused: it can't be read, is not PEM, or holds something else. */
function whyNot(path: string, isFlag: boolean, whyNotText: (text: string) => string): string {
  try {
    const text = readTextFile(path);
    return `${writtenPath(path)} ${text.includes("-----BEGIN ") ? whyNotText(text) : "is not a PEM file"}`;
  } catch (error) {
    return fileProblem(path, error, isFlag);
  }
}

const pem = (certificates: readonly X509Certificate[]): string | undefined =>
  certificates.length === 0 ? undefined : certificates.map((each) => each.toString()).join("");

/** A kind of value that names a PEM file. `parse` reads the file; `read` takes its text, for when the file is reread. */
export function pemFile(
  must: string,
  readOrThrow: (text: string) => string | undefined,
  whyNotText = (_: string) => "is a PEM file, but holds something else",
) {
  return {
    must,
    why: (path: string, isFlag: boolean) => whyNot(path, isFlag, whyNotText),
    read: (text: string) => attempt(() => readOrThrow(text)),
    parse: (path: string) => attempt(() => readOrThrow(readTextFile(path))),
  };
}

const certificatesIn = (text: string) => pem(parseCertificates(text));
export const certificateFile = pemFile("the path of a readable file with PEM certificates", certificatesIn);

/** The certificates of the file, all of which must be those of a CA, as PEM. */
export const caFile = pemFile("the path of a readable file with PEM certificates of a CA, and no others", (text) => {
  const found = parseCertificates(text);
  return found.every((certificate) => certificate.ca) ? pem(found) : undefined;
});

/** The first private key in the file, as PEM. */
export const privateKeyFile = pemFile(
  "the path of a readable file with a PEM private key without passphrase",
  (text) => {
    const [key] = text.match(PRIVATE_KEY) ?? [];
    if (key !== undefined) createPrivateKey(key);
    return key && `${key}\n`;
  },
);

/** Whether the key belongs to the first certificate. Both are PEM that has been parsed before. */
export const isKeyOf = (key: string, certificates: string): boolean =>
  new X509Certificate(certificates).checkPrivateKey(createPrivateKey(key));

/** How long before a certificate expires the warnings begin: enough time to issue a new one. */
export const EXPIRY_WARNING_MS = 14 * 86_400_000;

/** @param certificates PEM that has been parsed before @param now milliseconds since the epoch */
export function validityWarnings(name: string, certificates: string, now: number): string[] {
  return parseCertificates(certificates).flatMap((certificate) => {
    const [from, to] = [Date.parse(certificate.validFrom), Date.parse(certificate.validTo)];
    const which = `${name} holds a certificate that`;
    if (now < from) return `${which} is not valid before ${new Date(from).toISOString()}`;
    if (now > to) return `${which} expired at ${new Date(to).toISOString()}`;
    return now > to - EXPIRY_WARNING_MS ? `${which} expires at ${new Date(to).toISOString()}` : [];
  });
}

/** Completes a problem of TOLLGATE_TLS_KEY_FILE. */
export const keyMust = (key: string, cert: string) =>
  `must hold the key of the first certificate in TOLLGATE_TLS_CERT_FILE: ${resolve(key)} is not the key of ${resolve(cert)}`;

/** The paths of the files, or their texts. */
type TlsParts = Readonly<Record<"cert" | "key" | "clientCa", string>>;

/** Reads the files. Changes are found by a digest of their content, not by times or names, so that a swapped link counts too. */
export async function readTlsFiles(paths: TlsParts) {
  const [cert, key, clientCa] = await Promise.all([paths.cert, paths.key, paths.clientCa].map(currentText));
  const texts = { cert: cert ?? "", key: key ?? "", clientCa: clientCa ?? "" };
  // The digest is kept instead of the texts, since one of these is a private key.
  const digest = new Bun.CryptoHasher("sha256").update(JSON.stringify([cert, key, clientCa])).digest("hex");
  return { digest, judge: () => judge(texts, paths) };
}

/** The file's text; empty for a file that can't be read or is too large, which `judge` then refuses. */
async function currentText(path: string): Promise<string> {
  try {
    return (await stat(path)).size > FILE_BYTES_MAX ? "" : await readFile(path, "utf8");
  } catch {
    return "";
  }
}

function judge(texts: TlsParts, paths: TlsParts) {
  const [certName, keyName, caName] = ["TOLLGATE_TLS_CERT_FILE", "TOLLGATE_TLS_KEY_FILE", "TOLLGATE_CLIENT_CA_FILE"];
  const refused = (problem: string) => ({ tls: null, problem });
  const cert = certificateFile.read(texts.cert);
  if (cert === undefined) return refused(valueProblem(certName, certificateFile, paths.cert));
  const key = privateKeyFile.read(texts.key);
  if (key === undefined) return refused(valueProblem(keyName, privateKeyFile, paths.key));
  const clientCa = caFile.read(texts.clientCa);
  if (clientCa === undefined) return refused(valueProblem(caName, caFile, paths.clientCa));
  if (!isKeyOf(key, cert)) return refused(`${keyName} ${keyMust(paths.key, paths.cert)}`);
  const now = systemClock.now();
  const warnings = [...validityWarnings(certName, cert, now), ...validityWarnings(caName, clientCa, now)];
  return { tls: { cert, key, clientCa }, warnings };
}
