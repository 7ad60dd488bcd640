// A tenant's client certificate for its facilitator: one PEM text with the certificate, its private key and
// optionally the CA of the server. Which certificate is what is found out from the certificates themselves, so the
// order in the text does not matter. No message here repeats any part of the text.
import { createPrivateKey, type KeyObject, X509Certificate } from "node:crypto";
import type { ClientIdentity } from "../../http/client/tls-contexts.ts";

const MARK = /-----(BEGIN|END) ([A-Z0-9 ]{1,64})-----/g;
/** Signing with a larger one takes so long that a few handshakes would hold up everybody else's. */
const RSA_BITS_MAX = 4096;

interface PemBlock {
  readonly label: string;
  readonly text: string;
}

/** Mark by mark, so that no text takes longer than its length. */
function blocksOf(text: string): PemBlock[] {
  const blocks: PemBlock[] = [];
  let begin = { label: "", index: 0 };
  for (const { 0: mark, 1: side, 2: label = "", index } of text.matchAll(MARK)) {
    if (side === "BEGIN") begin = { label, index };
    else if (label === begin.label) blocks.push({ label, text: text.slice(begin.index, index + mark.length) });
  }
  return blocks;
}

/**
 * The client identity that a secret is; null when it is no PEM bundle.
 *
 * @throws Error when it is a bundle that can't be used
 */
export function clientIdentity(secret: string): ClientIdentity | null {
  const blocks = blocksOf(secret);
  const key = blocks.find(({ label }) => label.endsWith("PRIVATE KEY"));
  const pems = blocks.filter(({ label }) => label === "CERTIFICATE");
  if (key === undefined || pems.length === 0) return null;
  const certificates = pems.map(({ text }) => parsed(text));
  const leaf = leafOf(certificates, key.text);
  const others = certificates.filter((certificate) => certificate !== leaf);
  const chain = intermediatesOf(leaf, others);
  const roots = others.filter((certificate) => certificate.ca && !chain.includes(certificate));
  return {
    cert: [leaf, ...chain].map(String).join(""),
    key: `${key.text}\n`,
    ca: roots.length === 0 ? null : roots.map(String).join(""),
  };
}

function parsed(pem: string): X509Certificate {
  try {
    return new X509Certificate(pem);
  } catch {
    throw new Error("the bundle holds a certificate that can't be read");
  }
}

function leafOf(certificates: readonly X509Certificate[], keyPem: string): X509Certificate {
  const key = privateKey(keyPem);
  const leaf = certificates.find((certificate) => certificate.checkPrivateKey(key));
  if (leaf === undefined) throw new Error("no certificate of the bundle belongs to its private key");
  return leaf;
}

function privateKey(pem: string): KeyObject {
  let key: KeyObject;
  try {
    key = createPrivateKey(pem);
  } catch {
    throw new Error("the bundle's private key can't be read");
  }
  if ((key.asymmetricKeyDetails?.modulusLength ?? 0) <= RSA_BITS_MAX) return key;
  throw new Error(`the bundle's private key is longer than ${RSA_BITS_MAX} bits`);
}

/** What leads from the leaf towards its root, which the server has already. */
function intermediatesOf(leaf: X509Certificate, others: readonly X509Certificate[]): X509Certificate[] {
  const chain: X509Certificate[] = [];
  for (let at: X509Certificate | undefined = leaf; at !== undefined; ) {
    const subject: X509Certificate = at;
    at = others.find((other) => !chain.includes(other) && !other.checkIssued(other) && subject.checkIssued(other));
    if (at !== undefined) chain.push(at);
  }
  return chain;
}
