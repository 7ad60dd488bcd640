// Bodies of which parts are to be removed: after the end of a call, after a refusal, or because the call that they were
// stored for was never accepted, as when the process was killed. A note says so, and is written with the very thing that
// makes them loose, so that no part stays for ever. The parts go a few in each write, since all at once would hold up the
// event loop. Once they are going, no call is accepted with them any more.
import { and, eq, gt, gte, inArray, lte, notExists } from "drizzle-orm";
import type { BodyKind } from "../../../db/schema.ts";
import { every } from "../../concurrency/every.ts";
import { CAPTURE_BYTES_MAX } from "../../core/limits.ts";
import type { Log } from "../../core/log.ts";
import type { Mode } from "../../core/states.ts";
import type { Store, Tx } from "../../storage/store.ts";
import type { InvocationKey } from "./service.ts";

const LOOK_MS = 10_000;
const NOTES_AT_ONCE = 64;
/** To remove one takes half a millisecond of the event loop on SQLite (measured). */
export const PARTS_AT_ONCE = 4;

/** Up to here the parts of a request are removed in the very write that ends its call. */
const REMOVED_AT_ONCE_BYTES = CAPTURE_BYTES_MAX;

/** Whether the end of a call leaves parts of its request: they are too many to go with it. Of a stream few are stored. */
export function leavesParts(mode: Mode, size: number | null): boolean {
  return mode === "transactional" && (size ?? 0) > REMOVED_AT_ONCE_BYTES;
}

/** The same for a row of a Postgres statement. */
export const LEAVES_PARTS = `(mode = 'transactional' and coalesce(req_size, 0) > ${REMOVED_AT_ONCE_BYTES})`;

interface LooseBody extends InvocationKey {
  readonly kind: BodyKind;
}

/** The parts of this body go now, unless they belong to a call meanwhile. */
export async function loosen(store: Store, key: InvocationKey, kind: BodyKind): Promise<boolean> {
  return store.write((tx) => begin(tx, { ...key, kind }, Number.MAX_SAFE_INTEGER));
}

/** In the write that removes the call that they belonged to. */
export async function loosenRequest({ db, tables: { looseParts: t } }: Tx, { tenant, id }: InvocationKey) {
  await db.insert(t).values({ invocation_id: id, tenant, kind: "request", first: 0, due_at: 0 });
}

/** From here on no call can be accepted with these parts. */
async function begin({ db, tables: { looseParts: t } }: Tx, body: LooseBody, now: number): Promise<boolean> {
  const rows = await db
    .update(t)
    .set({ due_at: 0 })
    .where(and(isOf(t, body), lte(t.due_at, now)))
    .returning({ id: t.invocation_id });
  return rows.length > 0;
}

function isOf(t: Tx["tables"]["looseParts" | "bodyParts"], { tenant, id, kind }: LooseBody) {
  return and(eq(t.invocation_id, id), eq(t.kind, kind), eq(t.tenant, tenant));
}

/** Removes some of the parts, and the note with the last of them. Returns whether there are more. */
async function removeSome(tx: Tx, body: LooseBody, first: number): Promise<boolean> {
  const { bodyParts: t, looseParts: notes } = tx.tables;
  const some = tx.db
    .select({ n: t.n })
    .from(t)
    .where(and(isOf(t, body), gte(t.n, first)))
    .limit(PARTS_AT_ONCE);
  const removed = await tx.db
    .delete(t)
    .where(and(isOf(t, body), inArray(t.n, some)))
    .returning({ n: t.n });
  if (removed.length === PARTS_AT_ONCE) return true;
  // Another replica may be removing the same ones, and has left some when its rows were not found here.
  const left = tx.db
    .select({ n: t.n })
    .from(t)
    .where(and(isOf(t, body), gte(t.n, first)));
  await tx.db.delete(notes).where(and(isOf(notes, body), eq(notes.due_at, 0), notExists(left)));
  return false;
}

/**
 * Removes what is due. Gives how many bodies that were.
 *
 * @param isOver whether to stop, and leave the rest for later
 */
export async function removeLoose(
  store: Store,
  isOver: () => boolean = () => false,
  now: number = store.clock.now(),
): Promise<number> {
  const { looseParts: t } = store.read.tables;
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

/** On SQLite a body that is being stored when a process starts belongs to a call of the one before. */
async function loosenAbandoned(store: Store): Promise<void> {
  await store.write(async ({ db, tables: { looseParts: t } }) => {
    await db.update(t).set({ due_at: 0 }).where(gt(t.due_at, 0));
  });
}

/**
 * Before any call comes in. What a call leaves at its end goes right away, so that its room in the file is used again
 * before it is copied there; what else is due is looked for every few seconds. Gives what stops it.
 */
export async function startRemovingParts(store: Store, log: Log): Promise<() => void> {
  if (store.dialect === "sqlite") await loosenAbandoned(store);
  let removing: Promise<unknown> | null = null;
  let isAsked = false;
  let isOver = false;

  /** Never rejects. */
  async function remove(): Promise<void> {
    do {
      isAsked = false;
      await removeLoose(store, () => isOver).catch((error) => log.warn("parts_not_removed", { error }));
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
  const stop = every(LOOK_MS, look);
  return () => {
    isOver = true;
    stop();
  };
}
