// Pure rules for secrets: which text may be one, the hint that may be shown of it, and the header that it
// becomes. No message here repeats any part of a secret.
import type { AuthType } from "../../../db/schema.ts";
import { PLAINTEXT_BYTES_MAX } from "../../core/limits.ts";

/** Why a text can't be stored as a secret, or null. Tokens and PEM bundles are both fine. */
export function plaintextProblem(plaintext: string): string | null {
  if (!plaintext.isWellFormed()) return "must not contain lone surrogates";
  const bytes = Buffer.byteLength(plaintext);
  return bytes >= 1 && bytes <= PLAINTEXT_BYTES_MAX ? null : `must be 1 to ${PLAINTEXT_BYTES_MAX} bytes`;
}

const SHOWN = 4;
const HIDDEN_WHOLE_MAX = 8;

/** `…` and the last four characters; of eight or fewer only their number. */
export function maskedHint(plaintext: string): string {
  const characters = [...plaintext];
  if (characters.length <= HIDDEN_WHOLE_MAX) return "*".repeat(characters.length);
  // Postgres stores no U+0000.
  return `…${characters.slice(-SHOWN).join("").replaceAll("\0", "*")}`;
}

export interface CredentialHeader {
  readonly name: string;
  readonly value: string;
}

/** Visible ASCII, with blanks only inside: it arrives unchanged and cannot end the header. */
const HEADER_SAFE = /^[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?$/;

/** The header that carries the secret; undefined when no header can. */
export function credentialHeader(authType: Exclude<AuthType, "none">, secret: string): CredentialHeader | undefined {
  if (!HEADER_SAFE.test(secret)) return undefined;
  return authType === "bearer"
    ? { name: "authorization", value: `Bearer ${secret}` }
    : { name: "x-api-key", value: secret };
}
