// References into a tenant's part of a secrets store: `path#key`. Each segment of the path must be a plain name, so
// that a reference can't lead out of the tenant's prefix, neither in a file system nor in a URL.
import { VAULT_REF_CHARACTERS_MAX } from "../../core/limits.ts";
import { hasControls, textProblem } from "../../core/text.ts";

export interface VaultRef {
  readonly segments: readonly string[];
  /** Null when the reference names none. */
  readonly key: string | null;
}

export type VaultRefResult =
  | { readonly ok: true; readonly ref: VaultRef }
  | { readonly ok: false; readonly reason: string };

/** Whether a name can stand between two slashes of any path and mean only itself. */
export function isPlainSegment(segment: string): boolean {
  if (segment === "" || segment === "." || segment === "..") return false;
  return segment.isWellFormed() && !hasControls(segment) && !/[/\\%?#]/.test(segment);
}

export function parseVaultRef(text: string): VaultRefResult {
  const problem = textProblem(text, { min: 1, max: VAULT_REF_CHARACTERS_MAX });
  if (problem !== null) return { ok: false, reason: problem };
  const hash = text.indexOf("#");
  const path = hash === -1 ? text : text.slice(0, hash);
  const key = hash === -1 ? null : text.slice(hash + 1);
  const segments = path.split("/");
  if (!segments.every(isPlainSegment)) {
    return { ok: false, reason: "must be a path of plain names below the tenant's own prefix" };
  }
  if (key !== null && (key === "" || key.includes("#"))) {
    return { ok: false, reason: "must name one key after #" };
  }
  return { ok: true, ref: { segments, key } };
}
