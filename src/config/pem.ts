// The values that name PEM files: read at once, so that a wrong file is told at the start and not in the first
// handshake. What they hold is never shown.
import { createPrivateKey, X509Certificate } from "node:crypto";
import { readFileSync, statSync } from "node:fs";
import type { Kind } from "./values.ts";

const CERTIFICATE = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g;
const PRIVATE_KEY = /-----BEGIN ((?:RSA |EC )?PRIVATE KEY)-----[^-]+-----END \1-----/g;
const FILE_BYTES_MAX = 4 * 1024 * 1024;

/** Undefined when the file can't be read or is no PEM file by its size. */
function readText(path: string): string | undefined {
  try {
    return statSync(path).size > FILE_BYTES_MAX ? undefined : readFileSync(path, "utf8");
  } catch {
    return undefined;
  }
}

/** The certificates of a file, in its order; none when one of them can't be read. */
export function readCertificates(path: string): readonly X509Certificate[] {
  try {
    const found = readText(path)?.match(CERTIFICATE) ?? [];
    return found.map((certificate) => new X509Certificate(certificate));
  } catch {
    return [];
  }
}

function pem(certificates: readonly X509Certificate[]): string | undefined {
  return certificates.length === 0 ? undefined : certificates.map((each) => each.toString()).join("");
}

/** The file's certificates, as PEM. */
export const certificateFile: Kind<string> = {
  must: "the path of a readable file with PEM certificates",
  parse: (path) => pem(readCertificates(path)),
};

/** Of certificates that may sign others. */
export const caFile: Kind<string> = {
  must: "the path of a readable file with PEM certificates of a CA, and no others",
  parse: (path) => {
    const found = readCertificates(path);
    return found.every((certificate) => certificate.ca) ? pem(found) : undefined;
  },
};

/** The first private key in the file, as PEM. */
export const privateKeyFile: Kind<string> = {
  must: "the path of a readable file with a PEM private key without passphrase",
  parse: (path) => {
    const [key] = readText(path)?.match(PRIVATE_KEY) ?? [];
    try {
      if (key !== undefined) createPrivateKey(key);
      return key === undefined ? undefined : `${key}\n`;
    } catch {
      return undefined;
    }
  },
};

/** Whether the key belongs to the first of the certificates. All are PEM that has been read before. */
export function isKeyOf(key: string, certificates: string): boolean {
  return new X509Certificate(certificates).checkPrivateKey(createPrivateKey(key));
}
