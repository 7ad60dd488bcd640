// Secrets from files: `<dir>/<tenant>/<path>`, the layout of secret mounts of containers. The file must lie in the
// tenant's folder after all symbolic links are followed.
import { realpath } from "node:fs/promises";
import { join, sep } from "node:path";
import { CredentialFailure } from "./failure.ts";
import { readTextFile } from "./text-file.ts";
import type { VaultRef } from "./vault-ref.ts";

/**
 * The file's text, or the field of it that `ref` names; null when there is no such file.
 *
 * @param tenant a plain segment
 * @throws CredentialFailure when the file is there but holds no such secret, or lies elsewhere
 */
export async function readFromDirectory(dir: string, tenant: string, ref: VaultRef): Promise<string | null> {
  const home = await resolved(join(dir, tenant));
  if (home === null) return null;
  const path = await resolved(join(home, ...ref.segments));
  if (path === null) return null;
  if (!path.startsWith(home + sep)) {
    throw new CredentialFailure("a secret's file lies outside the tenant's folder");
  }
  const text = await readTextFile(path);
  return ref.key === null ? text.replace(/\r?\n$/, "") : fieldOf(parsed(text), ref.key);
}

const MISSING = ["ENOENT", "ENOTDIR", "ENAMETOOLONG"];

async function resolved(path: string): Promise<string | null> {
  try {
    return await realpath(path);
  } catch (cause) {
    if (cause instanceof Error && "code" in cause && MISSING.some((code) => code === cause.code)) return null;
    throw new CredentialFailure("a secret's path can't be followed", { cause });
  }
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    // The parser's own message may quote the text.
    throw new CredentialFailure("a secret's file is not JSON, and its reference names a field");
  }
}

/** The text in an object's field. @throws CredentialFailure when there is none */
export function fieldOf(value: unknown, key: string): string {
  if (typeof value === "object" && value !== null && Object.hasOwn(value, key)) {
    const field: unknown = Reflect.get(value, key);
    if (typeof field === "string") return field;
  }
  throw new CredentialFailure("a secret has no text under the key that its reference names");
}
