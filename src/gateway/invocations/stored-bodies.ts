// Large bodies in the database, part by part: stored before their call is accepted, read when it is made or shown.
import { and, eq, sql } from "drizzle-orm";
import type { BodyKind } from "../../../db/schema.ts";
import { inOneStep } from "../../concurrency/steps.ts";
import { prepared, type Reader, type Store, UniqueViolation } from "../../storage/store.ts";
import { bodyOf, type CallBody, partsOf } from "../../wire/body.ts";
import { isInParts, partsGone } from "./commands/accept.ts";
import { storePartCommand } from "./commands/store-part.ts";
import { loosen } from "./loose-parts.ts";
import type { AcceptedCall, InvocationKey } from "./service.ts";

/** For so long the parts of a body are kept for the call that is to be accepted with them. */
const KEPT_MS = 600_000;
/** Of one body: so the next part is ready when one is stored, and there is a turn of the event loop in between. */
const PARTS_AT_ONCE = 2;

/**
 * Stores the body of a call, if it is in parts, and then does `work`, which accepts it. If it does not, the parts are
 * removed: by somebody else and later, if this process is killed.
 *
 * @param work gives the ID of the call that was accepted, which may be an earlier one
 */
export function withStoredBody(store: Store, accepted: AcceptedCall, work: () => Promise<string>): Promise<string> {
  return isInParts(accepted.body) ? withStoredParts(store, accepted, work) : work();
}

async function withStoredParts(
  store: Store,
  { row: { tenant, id }, body }: AcceptedCall,
  work: () => Promise<string>,
): Promise<string> {
  const key = { tenant, id };
  let acceptedId: string | null = null;
  try {
    await storeParts(store, key, body);
    acceptedId = await work();
    return acceptedId;
  } finally {
    // Nothing is removed under a call that was accepted after all. What can't be noted now is found when it is due.
    if (acceptedId !== id) void loosen(store, key, "request").catch(() => {});
  }
}

/** @throws Fault `unavailable` */
async function storeParts(store: Store, key: InvocationKey, body: CallBody): Promise<void> {
  const dueAt = store.clock.now() + KEPT_MS;
  const parts = partsOf(body).map((bytes, n) => ({ key, n, bytes, dueAt }));
  for (let at = 0; at < parts.length; ) {
    const next = parts.slice(at, at + (at === 0 ? 1 : PARTS_AT_ONCE));
    const stored = await Promise.all(next.map((part) => store.execute(storePartCommand, part))).catch(tryLater);
    if (stored.includes(false)) throw partsGone();
    at += next.length;
  }
}

/** The parts of a try before this one are still there: it found an earlier call in its way, which has gone meanwhile. */
function tryLater(error: unknown): never {
  throw error instanceof UniqueViolation ? partsGone() : error;
}

const partByPlace = prepared(({ db, tables: { bodyParts: t } }: Reader) =>
  db
    .select({ bytes: t.bytes })
    .from(t)
    .where(
      and(
        eq(t.invocation_id, sql.placeholder("id")),
        eq(t.kind, sql.placeholder("kind")),
        eq(t.n, sql.placeholder("n")),
        eq(t.tenant, sql.placeholder("tenant")),
      ),
    ),
);

/**
 * The first parts of a stored body, each read in a turn of its own.
 *
 * @param bytesMax no more than so many bytes, which are whole parts
 */
async function storedParts(
  reader: Reader,
  key: InvocationKey,
  kind: BodyKind,
  bytesMax: number,
): Promise<Uint8Array[]> {
  const parts: Uint8Array[] = [];
  for (let bytes = 0; bytes < bytesMax; ) {
    const place = { ...key, kind, n: parts.length };
    const [part] = await inOneStep(() => partByPlace(reader).execute(place), key.tenant);
    if (part === undefined) break;
    // In memory of its own, which can move to another thread.
    const { buffer, byteOffset, byteLength } = part.bytes;
    const isOwn = byteLength === buffer.byteLength;
    parts.push(isOwn ? new Uint8Array(buffer, byteOffset, byteLength) : Uint8Array.prototype.slice.call(part.bytes));
    bytes += byteLength;
  }
  return parts;
}

/**
 * The request of an open call that is stored in parts. All of it is read before any of it is sent: a POST is never sent
 * twice, and a store that went away in the middle would leave half of one with the upstream. What is held of all calls
 * together is bounded, and shared out by tenant, by what may run (scheduler.ts: 96 MiB).
 *
 * @param size how long it is
 * @returns null when it is not there, as after the end of its call
 */
export async function storedRequest(reader: Reader, key: InvocationKey, size: number): Promise<CallBody | null> {
  const body = bodyOf(await storedParts(reader, key, "request", size));
  return body.byteLength === size ? body : null;
}

/** The start of a body that is stored in parts, in one piece; null when there is none. */
export async function storedStart(
  reader: Reader,
  key: InvocationKey,
  kind: BodyKind,
  bytesMax: number,
): Promise<Uint8Array | null> {
  const parts = await storedParts(reader, key, kind, bytesMax);
  const [only] = parts;
  if (only === undefined || parts.length === 1) return only ?? null;
  return Buffer.concat(parts);
}
