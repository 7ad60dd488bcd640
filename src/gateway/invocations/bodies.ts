// Large bodies in the database, part by part: stored before their call is accepted, read when it is made or shown, and
// removed when they are orphaned.
//
// Parts are orphaned after the end of a call, after a refusal, or because the call that they were stored for was never
// accepted, as when the process was killed. A note says so, and is written with the very thing that orphans them, so that no
// part stays for ever; the parts of a call that is not accepted yet have one from the first. The parts go a few in each write,
// since all at once would hold up the event loop. Once they are going, no call is accepted with them any more.
import { and, eq, gt, gte, inArray, lte, notExists, sql } from "drizzle-orm";
import type { BodyKind } from "../../../db/schema.ts";
import type { Log } from "../../core/log.ts";
import { every } from "../../kernel/loop.ts";
import { inTurn } from "../../kernel/turns.ts";
import {
  type Command,
  GIVEN_KEY,
  inputRows,
  isOfCall,
  prepared,
  type Reader,
  type Store,
  type Tx,
  UniqueViolation,
} from "../../storage/store.ts";
import { bodyOf, bodyPartsOf, type CallBody } from "../../wire/body.ts";
import { partsGone, sameRequest } from "./commands/accept.ts";
import { leavesParts } from "./commands/end.ts";
import type { AcceptedCall, InvocationKey } from "./service.ts";

interface BodyPart {
  readonly key: InvocationKey;
  /** The first one is stored before the others are handed in. */
  readonly n: number;
  readonly bytes: Uint8Array;
  /** When the parts of this body may be removed. */
  readonly dueAt: number;
}

const PART_INPUT = inputRows<BodyPart>({
  id: ["text", ({ key }) => key.id],
  tenant: ["text", ({ key }) => key.tenant],
  part: ["bigint", ({ n }) => n],
  due_at: ["bigint", ({ dueAt }) => dueAt],
  bytes: ["bytea", ({ bytes }) => bytes],
});

/** False when the parts of this body are being removed. */
export const storePartCommand: Command<BodyPart, boolean> = {
  name: "store_part",
  tenantOf: ({ key }) => key.tenant,
  bytesOf: ({ bytes }) => bytes.byteLength,
  sqlite(prepare) {
    const begin = prepare(
      "insert into orphaned_parts (invocation_id, tenant, kind, first, due_at) values (?, ?, 'request', 0, ?)",
    );
    const look = prepare(
      "select 1 from orphaned_parts where invocation_id = ? and kind = 'request' and tenant = ? and due_at <> 0",
    );
    const insert = prepare(
      "insert into body_parts (invocation_id, tenant, kind, n, bytes) values (?, ?, 'request', ?, ?)",
    );
    return ({ key: { id, tenant }, n, bytes, dueAt }) => {
      if (n === 0) begin.run(id, tenant, dueAt);
      else if (look.get(id, tenant) === null) return false;
      insert.run(id, tenant, n, bytes);
      return true;
    };
  },
  postgres: {
    // What removes the parts changes the locked row first, and so waits for a commit whose answer was lost.
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

/** Of one body: so the next part is ready when one is stored, and there is a turn of the event loop in between. */
const STORED_AT_ONCE = 2;

/**
 * Stores the body of a call in parts, and then does `work`, which accepts it. If it does not, the parts are removed: by
 * somebody else and later, if this process is killed.
 *
 * @param work gives the ID of the call that was accepted, which may be an earlier one
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
    // The parts go now, unless they belong to a call meanwhile. What can't be noted now is found when it is due.
    const body = { ...key, kind: "request" } as const;
    if (acceptedId !== id) void store.write((tx) => begin(tx, body, Number.MAX_SAFE_INTEGER)).catch(() => {});
  }
}

/** @throws Fault `unavailable` */
async function storeParts(store: Store, key: InvocationKey, body: CallBody): Promise<void> {
  // Parts of a body are kept for ten minutes for the call that is to be accepted with them.
  const dueAt = store.clock.now() + 600_000;
  const parts = bodyPartsOf(body).map((bytes, n) => ({ key, n, bytes, dueAt }));
  for (let at = 0; at < parts.length; ) {
    const next = parts.slice(at, at + (at === 0 ? 1 : STORED_AT_ONCE));
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
    .where(and(isOfCall(t, GIVEN_KEY), eq(t.kind, sql.placeholder("kind")), eq(t.n, sql.placeholder("n")))),
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
    const [part] = await inTurn(key.tenant, () => partByPlace(reader).execute(place));
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

const NOTES_AT_ONCE = 64;
/** To remove one takes half a millisecond of the event loop on SQLite (measured). */
export const REMOVED_PARTS_AT_ONCE = 4;

interface OrphanedBody extends InvocationKey {
  readonly kind: BodyKind;
}

/** In the write that removes the call that they belonged to. */
export async function orphanRequest({ db, tables: { orphanedParts: t } }: Tx, { tenant, id }: InvocationKey) {
  await db.insert(t).values({ invocation_id: id, tenant, kind: "request", first: 0, due_at: 0 });
}

/** From here on no call can be accepted with these parts. */
async function begin({ db, tables: { orphanedParts: t } }: Tx, body: OrphanedBody, now: number): Promise<boolean> {
  const rows = await db
    .update(t)
    .set({ due_at: 0 })
    .where(and(isOf(t, body), lte(t.due_at, now)))
    .returning({ id: t.invocation_id });
  return rows.length > 0;
}

function isOf(t: Tx["tables"]["orphanedParts" | "bodyParts"], body: OrphanedBody) {
  return and(isOfCall(t, body), eq(t.kind, body.kind));
}

/** Removes some of the parts, and the note with the last of them. Returns whether there are more. */
async function removeSome(tx: Tx, body: OrphanedBody, first: number): Promise<boolean> {
  const { bodyParts: t, orphanedParts: notes } = tx.tables;
  const isLeft = and(isOf(t, body), gte(t.n, first));
  const some = tx.db.select({ n: t.n }).from(t).where(isLeft).limit(REMOVED_PARTS_AT_ONCE);
  const removed = await tx.db
    .delete(t)
    .where(and(isOf(t, body), inArray(t.n, some)))
    .returning({ n: t.n });
  if (removed.length === REMOVED_PARTS_AT_ONCE) return true;
  // Another replica may be removing the same ones, and has left some when its rows were not found here.
  const left = tx.db.select({ n: t.n }).from(t).where(isLeft);
  await tx.db.delete(notes).where(and(isOf(notes, body), eq(notes.due_at, 0), notExists(left)));
  return false;
}

/**
 * Removes what is due. Gives how many bodies that were.
 *
 * @param isOver whether to stop, and leave the rest for later
 */
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
      if (!(await store.write((tx) => begin(tx, body, now)))) continue;
      while (!isOver() && (await store.write((tx) => removeSome(tx, body, first))));
      bodies++;
    }
    if (due.length < NOTES_AT_ONCE || isOver()) return bodies;
  }
}

/**
 * Before any call comes in. What a call leaves at its end goes right away, so that its room in the file is used again
 * before it is copied there; what else is due is looked for every few seconds. Gives what stops it.
 */
export async function startRemovingParts(store: Store, log: Log): Promise<() => void> {
  // Where a process is alone, a body that is being stored at its start belongs to a call of the process before.
  if (!store.isShared) {
    await store.write(({ db, tables: { orphanedParts: t } }) => db.update(t).set({ due_at: 0 }).where(gt(t.due_at, 0)));
  }
  let removing: Promise<unknown> | null = null;
  let isAsked = false;
  let isOver = false;

  /** Never rejects. */
  async function remove(): Promise<void> {
    do {
      isAsked = false;
      await removeOrphanedParts(store, () => isOver).catch((error) => log.warn("parts_not_removed", { error }));
    } while (isAsked && !isOver);
    removing = null;
  }

  function look(): Promise<unknown> {
    isAsked = true;
    removing ??= remove();
    return removing;
  }

  store.onCallEnded(({ mode, req_size }) => {
    if (!isOver && leavesParts(mode, req_size)) void look();
  });
  const stop = every(10_000, look);
  return () => {
    isOver = true;
    stop();
  };
}
