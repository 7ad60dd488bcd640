// Reads certificates from PEM text.
import { X509Certificate } from "node:crypto";

const CERTIFICATE = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g;
/** Signs of a file that is still being written: a certificate without its end, or a last line that stops inside a marker. */
const BROKEN_OFF = /-----BEGIN CERTIFICATE|(^|\n)-{1,5}[A-Z ]*$/;

const SERVER_AUTH = "1.3.6.1.5.5.7.3.1";

/** Whether the certificate is for servers alone, so that no server takes it from a client. */
export const isServerOnly = ({ keyUsage }: X509Certificate): boolean =>
  keyUsage?.length === 1 && keyUsage[0] === SERVER_AUTH;

/**
 * The certificates in the order of the text; anything between them is skipped.
 * @throws TypeError when a certificate is incomplete; also the parser's own errors, whose message may quote the text
 */
export function parseCertificates(text: string): X509Certificate[] {
  if (BROKEN_OFF.test(text.replace(CERTIFICATE, ""))) throw new TypeError("a certificate without its end");
  return (text.match(CERTIFICATE) ?? []).map((certificate) => new X509Certificate(certificate));
}
