// A tenant's client certificate for its facilitator: one PEM text with the certificate, its private key and
// optionally the CA of the server. Which certificate is what is found out from the certificates themselves, so the
// order in the text does not matter. No message here repeats any part of the text.
import { createPrivateKey, X509Certificate } from "node:crypto";
import type { ClientIdentity } from "../../edge/connections.ts";

const BLOCK = /-----BEGIN ([A-Z0-9 ]+)-----[\s\S]*?-----END \1-----/g;

interface Block {
  readonly label: string;
  readonly text: string;
}

function blocksOf(text: string): Block[] {
  return [...text.matchAll(BLOCK)].map(([block, label = ""]) => ({ label, text: block }));
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
  let leaf: X509Certificate | undefined;
  try {
    const key = createPrivateKey(keyPem);
    leaf = certificates.find((certificate) => certificate.checkPrivateKey(key));
  } catch {
    throw new Error("the bundle's private key can't be read");
  }
  if (leaf === undefined) throw new Error("no certificate of the bundle belongs to its private key");
  return leaf;
}

/** What leads from the leaf towards its root, which the server has already. */
function intermediatesOf(leaf: X509Certificate, others: readonly X509Certificate[]): X509Certificate[] {
  const chain: X509Certificate[] = [];
  for (let at: X509Certificate | undefined = leaf; at !== undefined; ) {
    const subject: X509Certificate = at;
    at = others.find(
      (other) => !chain.includes(other) && !other.checkIssued(other) && subject.checkIssued(other),
    );
    if (at !== undefined) chain.push(at);
  }
  return chain;
}
