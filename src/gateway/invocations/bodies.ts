// Large bodies in the database, stored in parts: written before their call is accepted, read when the call is made or shown,
// and removed when they are orphaned.
//
// Parts are orphaned by the end of their call, by its refusal, or because it was never accepted, as after a kill. A row of
// `orphaned_parts` (a note) says when the parts may be removed. It is written in the transaction that orphans them, and with
// the first part of a call that is not accepted yet, so that no part stays for ever. Each write removes only a few parts, so
// that the event loop is not held up. Once the removal has begun, no call is accepted with the parts.
import { and, eq, gt, gte, lte, notExists, sql } from "drizzle-orm";
import type { BodyKind } from "../../../db/schema.ts";
import type { Log } from "../../core/log.ts";
import { every } from "../../kernel/loop.ts";
import { inTurn } from "../../kernel/turns.ts";
import { outlastRequest } from "../../kernel/wait.ts";
import { deleteSome } from "../../storage/cleanup.ts";
import type { Command, Reader, Store, Tx } from "../../storage/store.ts";
import { GIVEN_KEY, inputRows, isOfCall, preparedRow, UniqueViolation } from "../../storage/store.ts";
import { bodyOf, bodyPartsOf, type CallBody } from "../../wire/body.ts";
import { partsGone, sameRequest } from "./commands/accept.ts";
import { leavesParts } from "./commands/end.ts";
import type { AcceptedCall, InvocationKey } from "./service.ts";

interface BodyPart {
  readonly key: InvocationKey;
  /** Position in the body. Part 0 must be stored before the others, since it brings the note. */
  readonly n: number;
  readonly bytes: Uint8Array;
  readonly dueAt: number;
}

const PART_INPUT = inputRows<BodyPart>({
  id: ["text", ({ key }) => key.id],
  tenant: ["text", ({ key }) => key.tenant],
  part: ["bigint", ({ n }) => n],
  due_at: ["bigint", ({ dueAt }) => dueAt],
  bytes: ["bytea", ({ bytes }) => bytes],
});

/** Stores one part. False when the parts of this body are being removed. */
export const storePartCommand: Command<BodyPart, boolean> = {
  name: "store_part",
  tenantOf: ({ key }) => key.tenant,
  bytesOf: ({ bytes }) => bytes.byteLength,
  sqlite(prepare) {
    const insertNote = prepare(
      "insert into orphaned_parts (invocation_id, tenant, kind, first, due_at) values (?, ?, 'request', 0, ?)",
    );
    const findNote = prepare(
      "select 1 from orphaned_parts where invocation_id = ? and kind = 'request' and tenant = ? and due_at <> 0",
    );
    const insertPart = prepare(
      "insert into body_parts (invocation_id, tenant, kind, n, bytes) values (?, ?, 'request', ?, ?)",
    );
    return ({ key: { id, tenant }, n, bytes, dueAt }) => {
      if (n === 0) insertNote.run(id, tenant, dueAt);
      else if (findNote.get(id, tenant) === null) return false;
      insertPart.run(id, tenant, n, bytes);
      return true;
    };
  },
  postgres: {
    // `for share` locks the note. A removal updates the note first, so it waits for this transaction, even for a lost commit.
    text: `
with input as (select * from ${PART_INPUT.source}),
begun as (
  insert into orphaned_parts (invocation_id, tenant, kind, first, due_at)
  select id, tenant, 'request', 0, due_at from input where part = 0
),
held as (
  select input.id, input.part from input, lateral (
    select 1 from orphaned_parts l
    where ${sameRequest("l", { tenant: "input.tenant", id: "input.id" })} and l.due_at <> 0
    for share
  ) l where input.part > 0
)
insert into body_parts (invocation_id, tenant, kind, n, bytes)
select id, tenant, 'request', part, bytes from input
where part = 0 or (id, part) in (select id, part from held)
returning invocation_id, n`,
    valuesOf: (inputs) => PART_INPUT.values(inputs),
    outputsOf(inputs, rows) {
      const stored = new Set(rows.map((row) => `${row["invocation_id"]} ${row["n"]}`));
      return inputs.map(({ key, n }) => stored.has(`${key.id} ${n}`));
    },
  },
};

/** Parts of one body in flight: enough that one is always ready to store, few enough that the event loop gets turns in between. */
const STORED_AT_ONCE = 2;

/**
 * Stores the body of a call in parts, then runs `work`, which accepts the call. If `work` does not accept it, the parts are
 * removed; if this process is killed meanwhile, another one removes them when they are due.
 * @param work returns the ID of the accepted call, which may be an earlier one
 */
export async function withStoredBody(
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
    // Have the parts removed now, unless a call has been accepted with them. If this write fails, they go when they are due.
    const orphan = { ...key, kind: "request" } as const;
    const remove = () => store.write((tx) => beginRemoval(tx, orphan, Number.MAX_SAFE_INTEGER));
    if (acceptedId !== id) void outlastRequest(remove).catch(() => {});
  }
}

/** @throws Fault `unavailable` when the parts are being removed */
async function storeParts(store: Store, key: InvocationKey, body: CallBody): Promise<void> {
  // The parts are kept for ten minutes, in which the call must be accepted.
  const dueAt = store.clock.now() + 600_000;
  const parts = bodyPartsOf(body).map((bytes, n) => ({ key, n, bytes, dueAt }));
  for (let at = 0; at < parts.length; ) {
    const next = parts.slice(at, at + (at === 0 ? 1 : STORED_AT_ONCE));
    const stored = await Promise.all(next.map((part) => store.execute(storePartCommand, part))).catch(throwPartsGone);
    if (stored.includes(false)) throw partsGone();
    at += next.length;
  }
}

/** A UniqueViolation means that an earlier try, whose idempotency key went to another call, left parts that are being removed. */
function throwPartsGone(error: unknown): never {
  throw error instanceof UniqueViolation ? partsGone() : error;
}

const partByNumber = preparedRow(({ db, tables: { bodyParts: t } }) =>
  db
    .select({ bytes: t.bytes })
    .from(t)
    .where(and(isOfCall(t, GIVEN_KEY), eq(t.kind, sql.placeholder("kind")), eq(t.n, sql.placeholder("n")))),
);

/** Reads the first parts of a stored body, each in a turn of its own, up to `bytesMax`, which must end with a whole part. */
async function storedParts(reader: Reader, key: InvocationKey, kind: BodyKind, bytesMax: number) {
  const parts: Uint8Array[] = [];
  for (let bytes = 0; bytes < bytesMax; ) {
    const partKey = { ...key, kind, n: parts.length };
    const part = await inTurn(key.tenant, () => partByNumber(reader, partKey));
    if (part === null) break;
    // Each part gets memory of its own, which can be transferred to another thread.
    const { buffer, byteOffset, byteLength } = part.bytes;
    const isOwn = byteLength === buffer.byteLength;
    parts.push(isOwn ? new Uint8Array(buffer, byteOffset, byteLength) : Uint8Array.prototype.slice.call(part.bytes));
    bytes += byteLength;
  }
  return parts;
}

/**
 * The request of an open call that is stored in parts. All of it is read before any of it is sent: a POST is never sent
 * twice, so a store that fails in the middle would leave half a request at the upstream for good. The scheduler bounds what
 * all calls together hold in memory (96 MiB), and shares it out by tenant.
 * @param size of the request in bytes
 * @returns null when the request is not stored any more, as after the end of its call
 */
export async function storedRequest(reader: Reader, key: InvocationKey, size: number): Promise<CallBody | null> {
  const body = bodyOf(await storedParts(reader, key, "request", size));
  return body.byteLength === size ? body : null;
}

/** The start of a body that is stored in parts, joined; null when no part is stored. */
export async function storedStart(reader: Reader, key: InvocationKey, kind: BodyKind, bytesMax: number) {
  const parts = await storedParts(reader, key, kind, bytesMax);
  const [only] = parts;
  if (only === undefined || parts.length === 1) return only ?? null;
  return Buffer.concat(parts);
}

const NOTES_AT_ONCE = 64;
/** Removing one part takes half a millisecond of the event loop on SQLite (measured). */
export const REMOVED_PARTS_AT_ONCE = 4;

interface OrphanedBody extends InvocationKey {
  readonly kind: BodyKind;
}

/** Notes the parts of a request as orphaned. To be called in the write that removes their call. */
export async function orphanRequest({ db, tables: { orphanedParts: t } }: Tx, { tenant, id }: InvocationKey) {
  await db.insert(t).values({ invocation_id: id, tenant, kind: "request", first: 0, due_at: 0 });
}

/** Begins the removal of parts that are due; after that no call can be accepted with them. False when they are not due. */
async function beginRemoval({ db, tables: { orphanedParts: t } }: Tx, body: OrphanedBody, now: number) {
  const rows = await db
    .update(t)
    .set({ due_at: 0 })
    .where(and(isOfBody(t, body), lte(t.due_at, now)))
    .returning({ id: t.invocation_id });
  return rows.length > 0;
}

const isOfBody = (t: Tx["tables"]["orphanedParts" | "bodyParts"], body: OrphanedBody) =>
  and(isOfCall(t, body), eq(t.kind, body.kind));

/** Removes a few parts, and the note with the last of them. Returns whether there may be more. */
async function removeSomeParts(tx: Tx, body: OrphanedBody, first: number): Promise<boolean> {
  const { bodyParts: t, orphanedParts: notes } = tx.tables;
  const isRemaining = and(isOfBody(t, body), gte(t.n, first));
  const removed = await deleteSome(tx, t, [t.invocation_id, t.kind, t.n], isRemaining, REMOVED_PARTS_AT_ONCE);
  if (removed === REMOVED_PARTS_AT_ONCE) return true;
  // Another replica may be removing the same parts, so that this delete finds too few rows although some parts remain.
  const remaining = tx.db.select({ n: t.n }).from(t).where(isRemaining);
  await tx.db.delete(notes).where(and(isOfBody(notes, body), eq(notes.due_at, 0), notExists(remaining)));
  return false;
}

/** Removes the parts that are due, until `isOver` returns true. Returns the number of bodies. */
export async function removeOrphanedParts(
  store: Store,
  isOver: () => boolean = () => false,
  now: number = store.clock.now(),
): Promise<number> {
  const { orphanedParts: t } = store.read.tables;
  let bodies = 0;
  for (;;) {
    const due = await store.read.db
      .select({ id: t.invocation_id, tenant: t.tenant, kind: t.kind, first: t.first })
      .from(t)
      .where(lte(t.due_at, now))
      .limit(NOTES_AT_ONCE);
    for (const { first, ...body } of due) {
      if (!(await store.write((tx) => beginRemoval(tx, body, now)))) continue;
      while (!isOver() && (await store.write((tx) => removeSomeParts(tx, body, first))));
      bodies++;
    }
    if (due.length < NOTES_AT_ONCE || isOver()) return bodies;
  }
}

/**
 * Starts the removal of orphaned parts, and must run before any call comes in. Parts of an ended call go right away, so that
 * SQLite reuses their pages soon; others that are due are looked for every ten seconds. Returns a function that stops it.
 */
export async function startRemovingParts(store: Store, log: Log): Promise<() => void> {
  // A process that has the database to itself knows at its start that unaccepted parts belong to calls of its predecessor.
  if (!store.isShared) {
    await store.write(({ db, tables: { orphanedParts: t } }) => db.update(t).set({ due_at: 0 }).where(gt(t.due_at, 0)));
  }
  let removing: Promise<unknown> | null = null;
  let isRequested = false;
  let isOver = false;

  /** Never rejects. */
  async function remove(): Promise<void> {
    do {
      isRequested = false;
      await removeOrphanedParts(store, () => isOver).catch((error) => log.warn("parts_not_removed", { error }));
    } while (isRequested && !isOver);
    removing = null;
  }

  function requestRemoval(): Promise<unknown> {
    isRequested = true;
    removing ??= remove();
    return removing;
  }

  store.onCallEnded(({ mode, req_size }) => {
    if (!isOver && leavesParts(mode, req_size)) void requestRemoval();
  });
  const stop = every(10_000, requestRemoval);
  return () => {
    isOver = true;
    stop();
  };
}
