// Envelope encryption with AES-256-GCM. Each secret has a data key of its own, wrapped by the key of its tenant; both layers carry
// the record's identity as additional data, so a sealed value opens only in the record that it was made for.
//
//   wrapped = version (1) · nonce (12) · ciphertext · tag (16)
//   sealed  = wrapped data key (61) · wrapped secret
//
// Nonces are random: under one tenant key that is safe for 2^32 secrets, and a data key seals one.
import { createCipheriv, createDecipheriv, randomBytes } from "node:crypto";

const CIPHER = "aes-256-gcm";
const VERSION = 1;
const NONCE_BYTES = 12;
const TAG_BYTES = 16;
const OVERHEAD_BYTES = 1 + NONCE_BYTES + TAG_BYTES;
const KEY_BYTES = 32;
const WRAPPED_KEY_BYTES = OVERHEAD_BYTES + KEY_BYTES;

export const newKey = (): Buffer => randomBytes(KEY_BYTES);

/** @param identity names what is wrapped, and is needed to unwrap it */
export function wrap(key: Uint8Array, plaintext: Uint8Array, identity: string): Buffer {
  const nonce = randomBytes(NONCE_BYTES);
  const cipher = createCipheriv(CIPHER, key, nonce, { authTagLength: TAG_BYTES });
  cipher.setAAD(additionalData(identity));
  const ciphertext = [cipher.update(plaintext), cipher.final()];
  return Buffer.concat([Buffer.of(VERSION), nonce, ...ciphertext, cipher.getAuthTag()]);
}

/** @throws Error when the key or the identity differs, or a byte has changed */
export function unwrap(key: Uint8Array, wrapped: Uint8Array, identity: string): Buffer {
  if (wrapped.length < OVERHEAD_BYTES || wrapped[0] !== VERSION) throw new Error("a wrapped value has an unknown form");
  const tagStart = wrapped.length - TAG_BYTES;
  const nonce = wrapped.subarray(1, 1 + NONCE_BYTES);
  const decipher = createDecipheriv(CIPHER, key, nonce, { authTagLength: TAG_BYTES });
  decipher.setAAD(additionalData(identity));
  decipher.setAuthTag(wrapped.subarray(tagStart));
  try {
    return Buffer.concat([decipher.update(wrapped.subarray(1 + NONCE_BYTES, tagStart)), decipher.final()]);
  } catch (cause) {
    throw new Error("a wrapped value does not open with this key and identity", { cause });
  }
}

/** Seals a secret under a fresh data key, which `tenantKey` wraps. */
export function seal(tenantKey: Uint8Array, plaintext: Uint8Array, identity: string): Buffer {
  const dataKey = newKey();
  return Buffer.concat([wrap(tenantKey, dataKey, identity), wrap(dataKey, plaintext, identity)]);
}

export function open(tenantKey: Uint8Array, sealed: Uint8Array, identity: string): Buffer {
  const dataKey = unwrap(tenantKey, sealed.subarray(0, WRAPPED_KEY_BYTES), identity);
  return unwrap(dataKey, sealed.subarray(WRAPPED_KEY_BYTES), identity);
}

/** Moves a sealed secret to another tenant key: only its data key is wrapped again. @throws Error as `unwrap` does */
export function resealDataKey(old: Uint8Array, next: Uint8Array, sealed: Uint8Array, identity: string): Buffer {
  const dataKey = unwrap(old, sealed.subarray(0, WRAPPED_KEY_BYTES), identity);
  return Buffer.concat([wrap(next, dataKey, identity), sealed.subarray(WRAPPED_KEY_BYTES)]);
}

/** The version is bound too, so that a later form can't be passed off as this one. */
const additionalData = (identity: string): Buffer => Buffer.from(`tollgate:${VERSION}:${identity}`);
