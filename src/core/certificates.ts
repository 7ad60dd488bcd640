// Certificates in PEM.
import { X509Certificate } from "node:crypto";

const CERTIFICATE = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g;
/** What a file that is being written has: a certificate without its end, or a last line that stops in its marker. */
const BROKEN_OFF = /-----BEGIN CERTIFICATE|(^|\n)-{1,5}[A-Z ]*$/;

/**
 * In their order, whatever stands between them.
 *
 * @throws when one is there in part only; and what the parser throws, which may show what it could not read
 */
export function parseCertificates(text: string): X509Certificate[] {
  if (BROKEN_OFF.test(text.replace(CERTIFICATE, ""))) throw new TypeError("a certificate without its end");
  return (text.match(CERTIFICATE) ?? []).map((certificate) => new X509Certificate(certificate));
}
