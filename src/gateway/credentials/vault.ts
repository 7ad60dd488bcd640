// Secrets from HashiCorp Vault or OpenBao: reads of the key-value engine, version 2, over its HTTP interface.
// `GET /v1/<mount>/data/<path>` answers `{ data: { data: { … }, metadata: { … } } }`.
import type { JsonAnswer, JsonLimits } from "../../http/client/fetch-json.ts";
import { CredentialFailure } from "./failure.ts";
import { fieldOf } from "./secrets-dir.ts";
import { readTextFile } from "./text-file.ts";
import type { VaultRef } from "./vault-ref.ts";

export interface VaultSettings {
  readonly address: string;
  /** Path below `/v1/` with the segment `{tenant}`. */
  readonly prefix: string;
  readonly token: string;
  /** Where the token came from, when that was a file: it is read anew for each request. */
  readonly tokenFile: string | null;
}

/** A GET, whatever its status. Rejects when there is no answer within the limits. */
export type FetchJson = (
  url: string,
  headers: Readonly<Record<string, string>>,
  limits: JsonLimits,
) => Promise<JsonAnswer>;

const LIMITS: JsonLimits = { timeoutMs: 5_000, bytesMax: 64 * 1024 };
const DEFAULT_KEY = "value";

/**
 * The text under the key that `ref` names; null when there is no such secret.
 *
 * @param tenant a plain segment
 * @throws CredentialFailure when Vault does not answer with the secret
 */
export async function readFromVault(
  settings: VaultSettings,
  fetchJson: FetchJson,
  tenant: string,
  ref: VaultRef,
): Promise<string | null> {
  const prefix = settings.prefix.replaceAll("{tenant}", encodeURIComponent(tenant));
  const path = ref.segments.map(encodeURIComponent).join("/");
  const url = `${settings.address.replace(/\/+$/, "")}/v1/${prefix}/${path}`;
  const answer = await ask(fetchJson, url, await currentToken(settings));
  if (answer.status === 404) return null;
  if (answer.status !== 200) throw new CredentialFailure(`vault answered ${answer.status}`);
  return fieldOf(propertyOf(propertyOf(answer.body, "data"), "data"), ref.key ?? DEFAULT_KEY);
}

async function ask(fetchJson: FetchJson, url: string, token: string) {
  try {
    return await fetchJson(url, { "x-vault-token": token, "x-vault-request": "true" }, LIMITS);
  } catch (cause) {
    throw new CredentialFailure("vault gave no answer", { cause });
  }
}

/** @throws when the file can't be read */
export async function currentToken({ token, tokenFile }: Pick<VaultSettings, "token" | "tokenFile">): Promise<string> {
  return tokenFile === null ? token : (await readTextFile(tokenFile)).trim();
}

function propertyOf(value: unknown, key: string): unknown {
  return typeof value === "object" && value !== null ? Reflect.get(value, key) : undefined;
}
