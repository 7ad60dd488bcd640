// Small text files that hold secrets, read whole and with a bound.
import { constants } from "node:fs";
import { open } from "node:fs/promises";
import { PLAINTEXT_BYTES_MAX } from "../../core/limits.ts";
import { CredentialFailure } from "./failure.ts";

/** A secret and a line break. */
const FILE_BYTES_MAX = PLAINTEXT_BYTES_MAX + 2;

/** @throws CredentialFailure when the file is no regular file of UTF-8 text, too large, or not readable */
export async function readTextFile(path: string): Promise<string> {
  try {
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    const file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    try {
      if (!(await file.stat()).isFile()) throw new CredentialFailure("a secret's file is not a regular file");
      const buffer = Buffer.alloc(FILE_BYTES_MAX + 1);
      const { bytesRead } = await file.read(buffer, 0, buffer.length, 0);
      if (bytesRead > FILE_BYTES_MAX) throw new CredentialFailure("a secret's file is too large");
      return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(buffer.subarray(0, bytesRead));
    } finally {
      await file.close();
    }
  } catch (cause) {
    if (cause instanceof CredentialFailure) throw cause;
    throw new CredentialFailure("a secret's file can't be read", { cause });
  }
}
