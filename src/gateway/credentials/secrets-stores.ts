// Reads secrets of tenants from files of a mounted folder, and from HashiCorp Vault or OpenBao. A tenant's reference,
// `path#key`, can't leave the tenant's own prefix, neither in the file system nor in a URL.
import { constants } from "node:fs";
import { open, realpath } from "node:fs/promises";
import { join, sep } from "node:path";
import { errorCode } from "../../core/fault.ts";
import { hasControls, textProblem } from "../../core/text.ts";
import type { JsonAnswer, JsonLimits } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { CredentialFailure } from "../upstream/failure.ts";

interface VaultRef {
  readonly segments: readonly string[];
  readonly key: string | null;
}

type VaultRefResult = { readonly ok: true; readonly ref: VaultRef } | { readonly ok: false; readonly reason: string };

/** Whether a name can be one segment of a file path or URL path, with no special meaning. */
export function isPlainSegment(segment: string): boolean {
  if (segment === "" || segment === "." || segment === "..") return false;
  return segment.isWellFormed() && !hasControls(segment) && !/[/\\%?#]/.test(segment);
}

export function parseVaultRef(text: string): VaultRefResult {
  const problem = textProblem(text, { min: 1, max: MAX.vaultRefCharacters });
  if (problem !== null) return { ok: false, reason: problem };
  const hash = text.indexOf("#");
  const path = hash === -1 ? text : text.slice(0, hash);
  const key = hash === -1 ? null : text.slice(hash + 1);
  const segments = path.split("/");
  if (!segments.every(isPlainSegment)) {
    return { ok: false, reason: "must be a path of plain names below the tenant's own prefix" };
  }
  if (key !== null && (key === "" || key.includes("#"))) return { ok: false, reason: "must name one key after #" };
  return { ok: true, ref: { segments, key } };
}

/** The largest secret and a line break. */
const FILE_BYTES_MAX = MAX.plaintextBytes + 2;

/** @throws CredentialFailure when the file is not a regular file of UTF-8 text, is too large, or can't be read */
async function readTextFile(path: string): Promise<string> {
  try {
    // Without O_NONBLOCK, opening a named pipe would wait for its writer.
    await using file = await open(path, constants.O_RDONLY | constants.O_NONBLOCK);
    if (!(await file.stat()).isFile()) throw new CredentialFailure("a secret's file is not a regular file");
    const buffer = Buffer.alloc(FILE_BYTES_MAX + 1);
    const { bytesRead } = await file.read(buffer, 0, buffer.length, 0);
    if (bytesRead > FILE_BYTES_MAX) throw new CredentialFailure("a secret's file is too large");
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(buffer.subarray(0, bytesRead));
  } catch (cause) {
    if (cause instanceof CredentialFailure) throw cause;
    throw new CredentialFailure("a secret's file can't be read", { cause });
  }
}

/**
 * The text of the file `<dir>/<tenant>/<path>` (as container platforms mount secrets), or its JSON field that `ref` names;
 * null when there is no such file. The file must be in the tenant's folder after all symbolic links are followed.
 * @param tenant a plain segment
 * @throws CredentialFailure when the file exists but has no such secret, or is outside the folder
 */
export async function readFromDirectory(dir: string, tenant: string, ref: VaultRef): Promise<string | null> {
  const home = await resolved(join(dir, tenant));
  if (home === null) return null;
  const path = await resolved(join(home, ...ref.segments));
  if (path === null) return null;
  if (!path.startsWith(home + sep)) throw new CredentialFailure("a secret's file is outside the tenant's folder");
  const text = await readTextFile(path);
  if (ref.key === null) return text.replace(/\r?\n$/, "");
  let parsed: unknown;
  try {
    parsed = JSON.parse(text);
  } catch {
    // The parser's own message may quote the text.
    throw new CredentialFailure("a secret's file is not JSON, but its reference names a key");
  }
  return fieldOf(parsed, ref.key);
}

const MISSING = ["ENOENT", "ENOTDIR", "ENAMETOOLONG"];

async function resolved(path: string): Promise<string | null> {
  try {
    return await realpath(path);
  } catch (cause) {
    if (MISSING.includes(errorCode(cause) ?? "")) return null;
    throw new CredentialFailure("a secret's path can't be resolved", { cause });
  }
}

/** The string in a field of an object. @throws CredentialFailure when there is none */
function fieldOf(value: unknown, key: string): string {
  if (typeof value === "object" && value !== null && Object.hasOwn(value, key)) {
    const field: unknown = Reflect.get(value, key);
    if (typeof field === "string") return field;
  }
  throw new CredentialFailure("a secret has no text under the key that its reference names");
}

export interface VaultSettings {
  readonly address: string;
  /** Path below `/v1/` with the segment `{tenant}`. */
  readonly prefix: string;
  readonly token: string;
  /** The file that the token came from, read again for each request; null when the token was configured directly. */
  readonly tokenFile: string | null;
}

/** Makes a GET and returns the answer, whatever its status. Rejects when there is no answer within the limits. */
export type FetchJson = (
  url: string,
  headers: Readonly<Record<string, string>>,
  limits: JsonLimits,
) => Promise<JsonAnswer>;

/**
 * The text under the key that `ref` names, from the key-value engine, version 2, of HashiCorp Vault or OpenBao; null when
 * there is no such secret. `GET /v1/<mount>/data/<path>` answers `{ data: { data: { … }, metadata: { … } } }`.
 * @param tenant a plain segment
 * @throws CredentialFailure when Vault does not answer with the secret
 */
export async function readFromVault(settings: VaultSettings, fetchJson: FetchJson, tenant: string, ref: VaultRef) {
  const prefix = settings.prefix.replaceAll("{tenant}", encodeURIComponent(tenant));
  const path = ref.segments.map(encodeURIComponent).join("/");
  const url = `${settings.address.replace(/\/+$/, "")}/v1/${prefix}/${path}`;
  const headers = { "x-vault-token": await currentToken(settings), "x-vault-request": "true" };
  const answer = await fetchJson(url, headers, { timeoutMs: 5_000, bytesMax: 64 * 1024 }).catch((cause) => {
    throw new CredentialFailure("vault gave no answer", { cause });
  });
  if (answer.status === 404) return null;
  if (answer.status !== 200) throw new CredentialFailure(`vault answered ${answer.status}`);
  return fieldOf(propertyOf(propertyOf(answer.body, "data"), "data"), ref.key ?? "value");
}

/** @throws when the file can't be read */
export async function currentToken({ token, tokenFile }: Pick<VaultSettings, "token" | "tokenFile">): Promise<string> {
  return tokenFile === null ? token : (await readTextFile(tokenFile)).trim();
}

const propertyOf = (value: unknown, key: string): unknown =>
  typeof value === "object" && value !== null ? Reflect.get(value, key) : undefined;
