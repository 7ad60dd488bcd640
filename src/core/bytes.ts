// Bytes in the form that the database drivers and the encoders of Node want them.

/** The same bytes as a Buffer: a view, not a copy. */
export function asBuffer(bytes: Uint8Array): Buffer {
  return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
