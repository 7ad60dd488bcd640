// Certificates for mutual TLS on loopback, made afresh for each caller: a private CA with a server and clients that
// are in order, and one client for each way of not being so. Made here and not by the product's own issuer, so that
// the two can be held against each other.
import { createPrivateKey, X509Certificate as ReadCertificate } from "node:crypto";
import type { X509Certificate } from "@peculiar/x509";

// The X.509 library does not load without these two functions (src/cli/pki.ts says why), so it is imported after them.
if (!("getMetadata" in Reflect)) {
  const nothing = { value: () => undefined, configurable: true, writable: true };
  Object.defineProperties(Reflect, { getMetadata: nothing, getOwnMetadata: nothing });
}
const x509 = await import("@peculiar/x509");

const ALGORITHM = { name: "ECDSA", namedCurve: "P-256", hash: "SHA-256" } as const;
const HOUR_MS = 3_600_000;

export interface TestIdentity {
  /** PEM. */
  readonly cert: string;
  readonly key: string;
  /** SHA-256 of the certificate: 64 hex digits, lower case. */
  readonly fingerprint: string;
}

interface Authority extends TestIdentity {
  readonly certificate: X509Certificate;
  readonly signingKey: CryptoKey;
}

interface LeafOptions {
  readonly usage?: "clientAuth" | "serverAuth";
  readonly notBefore?: Date;
  readonly notAfter?: Date;
  /** Names and addresses of a server. */
  readonly hosts?: readonly string[];
}

export type Pki = Awaited<ReturnType<typeof makePki>>;

export async function makePki() {
  const [ca, foreign] = await Promise.all([makeAuthority("ca"), makeAuthority("foreign ca")]);
  const now = Date.now();
  const [server, client, otherClient, expired, notYetValid, wrongUsage, otherCa, selfSigned] = await Promise.all([
    makeLeaf(ca, "server", { usage: "serverAuth", hosts: ["127.0.0.1", "localhost"] }),
    makeLeaf(ca, "client"),
    makeLeaf(ca, "other client"),
    makeLeaf(ca, "expired", {
      notBefore: new Date(now - 2 * HOUR_MS),
      notAfter: new Date(now - HOUR_MS),
    }),
    makeLeaf(ca, "not yet valid", {
      notBefore: new Date(now + HOUR_MS),
      notAfter: new Date(now + 2 * HOUR_MS),
    }),
    makeLeaf(ca, "wrong usage", { usage: "serverAuth" }),
    makeLeaf(foreign, "of another ca"),
    makeLeaf(null, "self-signed"),
  ]);
  return {
    ca: { cert: ca.cert, key: ca.key, fingerprint: ca.fingerprint } satisfies TestIdentity,
    /** For 127.0.0.1 and localhost. */
    server,
    client,
    otherClient,
    expired,
    notYetValid,
    /** May be a server only. */
    wrongUsage,
    /** Of a CA that nobody here trusts. */
    otherCa,
    selfSigned,
    /** One more client of the CA. */
    issueClient: (name: string, options: LeafOptions = {}) => makeLeaf(ca, name, options),
    /** A client whose certificate another client has signed, with its own key and name. */
    issueBelow: (name: string, issuer: TestIdentity) => makeBelow(name, issuer),
  };
}

async function makeBelow(name: string, issuer: TestIdentity): Promise<TestIdentity> {
  const der = createPrivateKey(issuer.key).export({ type: "pkcs8", format: "der" });
  const signingKey = await crypto.subtle.importKey("pkcs8", new Uint8Array(der), ALGORITHM, false, ["sign"]);
  return makeLeaf({ certificate: new x509.X509Certificate(issuer.cert), signingKey }, name);
}

async function makeAuthority(name: string): Promise<Authority> {
  const keys = await crypto.subtle.generateKey(ALGORITHM, true, ["sign", "verify"]);
  const certificate = await x509.X509CertificateGenerator.createSelfSigned({
    name: [{ CN: [name] }],
    serialNumber: randomSerial(),
    notBefore: new Date(Date.now() - 24 * HOUR_MS),
    notAfter: new Date(Date.now() + 24 * HOUR_MS),
    keys,
    signingAlgorithm: ALGORITHM,
    extensions: [
      new x509.BasicConstraintsExtension(true, 0, true),
      new x509.KeyUsagesExtension(x509.KeyUsageFlags.keyCertSign, true),
      await x509.SubjectKeyIdentifierExtension.create(keys.publicKey),
    ],
  });
  return { ...(await identity(certificate, keys.privateKey)), certificate, signingKey: keys.privateKey };
}

/** @param authority null for one that signs itself */
async function makeLeaf(
  authority: Pick<Authority, "certificate" | "signingKey"> | null,
  name: string,
  { usage = "clientAuth", hosts = [], ...period }: LeafOptions = {},
): Promise<TestIdentity> {
  const keys = await crypto.subtle.generateKey(ALGORITHM, true, ["sign", "verify"]);
  const subject = [{ CN: [name] }];
  const names = hosts.map((value) => ({
    type: /^[\d.]+$/.test(value) ? ("ip" as const) : ("dns" as const),
    value,
  }));
  const certificate = await x509.X509CertificateGenerator.create({
    subject,
    issuer: authority?.certificate.subjectName ?? subject,
    serialNumber: randomSerial(),
    notBefore: period.notBefore ?? new Date(Date.now() - HOUR_MS),
    notAfter: period.notAfter ?? new Date(Date.now() + HOUR_MS),
    publicKey: keys.publicKey,
    signingKey: authority?.signingKey ?? keys.privateKey,
    signingAlgorithm: ALGORITHM,
    extensions: [
      new x509.BasicConstraintsExtension(false, undefined, true),
      new x509.KeyUsagesExtension(x509.KeyUsageFlags.digitalSignature, true),
      new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage[usage]]),
      ...(authority === null
        ? []
        : [await x509.AuthorityKeyIdentifierExtension.create(authority.certificate.publicKey)]),
      ...(names.length > 0 ? [new x509.SubjectAlternativeNameExtension(names)] : []),
    ],
  });
  return identity(certificate, keys.privateKey);
}

async function identity(certificate: X509Certificate, key: CryptoKey): Promise<TestIdentity> {
  const cert = `${certificate.toString("pem")}\n`;
  const der = Buffer.from(await crypto.subtle.exportKey("pkcs8", key)).toString("base64");
  return {
    cert,
    key: `-----BEGIN PRIVATE KEY-----\n${der.replace(/(.{64})(?=.)/g, "$1\n")}\n-----END PRIVATE KEY-----\n`,
    fingerprint: new ReadCertificate(cert).fingerprint256.replaceAll(":", "").toLowerCase(),
  };
}

/** Positive, as RFC 5280 wants it. */
function randomSerial(): string {
  return `41${crypto.getRandomValues(new Uint8Array(15)).toHex()}`;
}
