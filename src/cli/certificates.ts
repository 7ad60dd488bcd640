// The certificates of the private CA (RFC 5280), by the X.509 library: what each kind may be used for and how long
// it holds. EC P-256 throughout, which every TLS implementation takes.

import "./reflect.ts";
import { createPrivateKey, createPublicKey, X509Certificate as ReadCertificate } from "node:crypto";
import type { Extension, JsonGeneralName, X509Certificate } from "@peculiar/x509";

// Not a static import: imports of CommonJS modules run first, before the one above.
const x509 = await import("@peculiar/x509");

/** A certificate and its private key (PKCS #8), as PEM. */
export interface CertifiedKey {
  readonly cert: string;
  readonly key: string;
}

const KEYS = { name: "ECDSA", namedCurve: "P-256" } as const;
const SIGNATURE = { name: "ECDSA", hash: "SHA-256" } as const;

const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
/** The clocks of two machines may differ by this much. */
const BACKDATED_MS = HOUR_MS;
const CA_DAYS = 3_652;
/** A year and a month to renew in. Some clients refuse servers that hold for longer than 398 days. */
const LEAF_DAYS = 397;
/** Of the certificate itself: it may be used in no other way than these say. */
const CRITICAL = true;

/** A root that signs end certificates and no further CA. */
export async function issueCa(now: number): Promise<CertifiedKey> {
  const keys = await newKeys();
  const serialNumber = newSerial();
  const certificate = await x509.X509CertificateGenerator.createSelfSigned({
    // The digits tell two roots apart where a person has to.
    name: [{ CN: [`tollgate CA ${serialNumber.slice(0, 8)}`] }],
    serialNumber,
    notBefore: new Date(now - BACKDATED_MS),
    notAfter: new Date(now + CA_DAYS * DAY_MS),
    keys,
    signingAlgorithm: SIGNATURE,
    extensions: [
      new x509.BasicConstraintsExtension(true, 0, CRITICAL),
      new x509.KeyUsagesExtension(x509.KeyUsageFlags.keyCertSign | x509.KeyUsageFlags.cRLSign, CRITICAL),
      await x509.SubjectKeyIdentifierExtension.create(keys.publicKey),
      await x509.AuthorityKeyIdentifierExtension.create(keys.publicKey),
    ],
  });
  return { cert: pem(certificate), key: await privateKeyPem(keys.privateKey) };
}

/** @param hosts names and addresses without brackets, all that the server is called by */
export function issueServer(ca: CertifiedKey, hosts: readonly string[], now: number): Promise<CertifiedKey> {
  const names = hosts.map((value): JsonGeneralName => ({ type: isAddress(value) ? "ip" : "dns", value }));
  const extensions = [
    new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage.serverAuth]),
    new x509.SubjectAlternativeNameExtension(names),
  ];
  return issue(ca, "tollgate server", extensions, now);
}

export function issueClient(ca: CertifiedKey, name: string, now: number): Promise<CertifiedKey> {
  return issue(ca, name, [new x509.ExtendedKeyUsageExtension([x509.ExtendedKeyUsage.clientAuth])], now);
}

async function issue(
  ca: CertifiedKey,
  name: string,
  purpose: readonly Extension[],
  now: number,
): Promise<CertifiedKey> {
  const issuer = new x509.X509Certificate(ca.cert);
  const keys = await newKeys();
  const certificate = await x509.X509CertificateGenerator.create({
    subject: [{ CN: [name] }],
    issuer: issuer.subjectName,
    serialNumber: newSerial(),
    notBefore: new Date(now - BACKDATED_MS),
    // A certificate must not outlive its CA.
    notAfter: new Date(Math.min(now + LEAF_DAYS * DAY_MS, issuer.notAfter.getTime())),
    publicKey: keys.publicKey,
    signingKey: await readSigningKey(ca.key),
    signingAlgorithm: SIGNATURE,
    extensions: [
      new x509.BasicConstraintsExtension(false, undefined, CRITICAL),
      new x509.KeyUsagesExtension(x509.KeyUsageFlags.digitalSignature, CRITICAL),
      ...purpose,
      await x509.SubjectKeyIdentifierExtension.create(keys.publicKey),
      await x509.AuthorityKeyIdentifierExtension.create(issuer.publicKey),
    ],
  });
  return { cert: pem(certificate), key: await privateKeyPem(keys.privateKey) };
}

/** Why this is no CA that can sign, or null. */
export function caProblem(ca: CertifiedKey, now: number): string | null {
  try {
    const certificate = new ReadCertificate(ca.cert);
    const key = createPrivateKey(ca.key);
    if (!certificate.ca) return "the certificate is not one of a CA";
    if (!certificate.checkPrivateKey(key)) return "the key is not the certificate's";
    if (createPublicKey(key).asymmetricKeyDetails?.namedCurve !== "prime256v1") return "the key is not P-256";
    return now < Date.parse(certificate.validTo) ? null : "the certificate has expired";
  } catch {
    return "they are not PEM of a certificate and its private key";
  }
}

function isAddress(host: string): boolean {
  return host.includes(":") || /^[\d.]+$/.test(host);
}

function newKeys(): Promise<CryptoKeyPair> {
  return crypto.subtle.generateKey(KEYS, true, ["sign", "verify"]);
}

/** 126 random bits in 16 bytes: the first two are fixed, so that the number is positive and never shorter. */
function newSerial(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[0] = ((bytes[0] ?? 0) & 0x3f) | 0x40;
  return bytes.toHex();
}

function pem(certificate: X509Certificate): string {
  return `${certificate.toString("pem")}\n`;
}

async function privateKeyPem(key: CryptoKey): Promise<string> {
  return `${x509.PemConverter.encode(await crypto.subtle.exportKey("pkcs8", key), x509.PemConverter.PrivateKeyTag)}\n`;
}

function readSigningKey(key: string): Promise<CryptoKey> {
  const der = createPrivateKey(key).export({ type: "pkcs8", format: "der" });
  return crypto.subtle.importKey("pkcs8", new Uint8Array(der), KEYS, false, ["sign"]);
}
