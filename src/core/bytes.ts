// Conversions of bytes that several rooms need: a Buffer view, Ethereum's hex, several parts joined into one array.

/** A view of the bytes as a Buffer, for database drivers and the encoders of Node; nothing is copied. */
export const asBuffer = (bytes: Uint8Array): Buffer => Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);

/** Bytes as Ethereum writes them: `0x` and hexadecimal digits; in lower case wherever two values are compared. */
export type Hex = `0x${string}`;

/** A copy in memory of its own (Buffer.concat may use a shared pool), so that it can be transferred to another thread. */
export const joined = (parts: readonly Uint8Array[]): Uint8Array =>
  Bun.concatArrayBuffers([...parts], Number.POSITIVE_INFINITY, true);
