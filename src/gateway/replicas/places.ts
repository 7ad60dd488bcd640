// How replicas share the places of an agent, in the database. Each of the first few has a base: so many calls of every
// agent it may run without asking. What is left of the limit is granted, agent by agent and path by path, to whoever needs
// it, and given back when it is needed no more or when another one needs it too. For each agent the bases of all replicas
// and what has been granted are never more than the limit: all changes are made under one lock, nothing is granted beyond
// what is left, and a base is raised only when no agent has been granted so much that it would be too much then. What a
// replica has stays its own until it gives it back or is taken for gone, and its calls have been ended.
import { and, count, eq, gt, ne, sum } from "drizzle-orm";
import { oneOf } from "../../../db/conditions.ts";
import type { Mode } from "../../core/states.ts";
import type { Tx } from "../../storage/store.ts";
import { areLoose, lockPlaces, renewLease } from "./store.ts";

/** The base, as a part of the limit. */
const BASE_PART = 16;
/** All bases together, as a part of the limit. */
const BASES_PART = 2;

export const baseOf = (limit: number): number => Math.floor(limit / BASE_PART);

export interface PlacesAsk {
  readonly tenant: string;
  readonly agent_id: string;
  readonly mode: Mode;
  /** What it has beyond its base and does not give back yet. */
  readonly kept: number;
  /** What it needs beyond its base. */
  readonly wanted: number;
}

export interface PlacesGrant {
  readonly granted: number;
  /** What it may go on to have: less than was granted when another replica needs some of it. */
  readonly part: number;
}

interface Exchange {
  readonly replica: string;
  /** Calls of one agent on one path, of all replicas together. */
  readonly limit: number;
  /** @param isNew whether it had nothing: what runs here is counted whole then */
  asksOf(isNew: boolean): readonly PlacesAsk[];
}

export interface Exchanged {
  readonly isNew: boolean;
  readonly base: number;
  /** In the order of what was asked. */
  readonly grants: readonly PlacesGrant[];
}

/** Tells what this replica needs, and gives what it has from now on. Renews its lease first. */
export async function exchange(tx: Tx, { replica, limit, asksOf }: Exchange): Promise<Exchanged> {
  await lockPlaces(tx);
  const { agent_base } = await renewLease(tx, replica);
  const { replicas: t } = tx.tables;
  const isNew = agent_base === null;
  if (isNew) await tx.db.delete(tx.tables.agentPlaces).where(areLoose(tx.db, tx.tables));
  const base = agent_base ?? 0;
  const [others] = await tx.db
    .select({ bases: sum(t.agent_base), members: count(t.agent_base) })
    .from(t)
    .where(ne(t.id, replica));
  // Of those with a higher limit they may be more than the part that is for bases here.
  const left = limit - Math.min(Number(others?.bases ?? 0), Math.floor(limit / BASES_PART));
  const pool = Math.min(left - base, limit - basesDue(limit, Number(others?.members ?? 0) + 1));
  const grants = await grant(tx, replica, pool, asksOf(isNew));
  const next = await raised(tx, base, limit, left);
  if (next !== agent_base) await tx.db.update(t).set({ agent_base: next }).where(eq(t.id, replica));
  return { isNew, base: next, grants };
}

/**
 * All bases together once each replica has its own. So much is not granted, and what was is given back: or else the calls of
 * one agent, on a replica that has been there for longer, could keep a newcomer without a base for all others.
 */
function basesDue(limit: number, members: number): number {
  const base = baseOf(limit);
  return base === 0 ? 0 : base * Math.min(members, Math.floor(limit / BASES_PART / base));
}

/** @param left what the bases of the others leave of the limit */
async function raised({ db, tables: { agentPlaces: t } }: Tx, base: number, limit: number, left: number) {
  const wanted = baseOf(limit);
  const pool = left - wanted;
  if (base >= wanted || limit - pool > limit / BASES_PART) return base;
  const above = await db
    .select({ agent_id: t.agent_id })
    .from(t)
    .groupBy(t.agent_id, t.mode)
    .having(gt(sum(t.granted), pool))
    .limit(1);
  return above.length === 0 ? wanted : base;
}

async function grant(tx: Tx, replica: string, pool: number, asks: readonly PlacesAsk[]): Promise<PlacesGrant[]> {
  if (asks.length === 0) return [];
  const { agentPlaces: t } = tx.tables;
  const ids = asks.map(({ agent_id }) => agent_id);
  const rows = await tx.db.select().from(t).where(oneOf(t.agent_id, ids));
  const others = Map.groupBy(
    rows.filter((row) => row.replica !== replica),
    keyOf,
  );
  const before = new Map(rows.filter((row) => row.replica === replica).map((row) => [keyOf(row), row.granted]));
  const grants = asks.map((ask) => {
    // What it gives back only now counts as its own, so that it does not take it again at once.
    const own = { granted: Math.max(ask.kept, before.get(keyOf(ask)) ?? 0), wanted: ask.wanted };
    return grantOf(pool, ask.kept, own, others.get(keyOf(ask)) ?? []);
  });
  await tx.db.delete(t).where(and(eq(t.replica, replica), oneOf(t.agent_id, ids)));
  const kept = rows.filter((row) => row.replica === replica && !asks.some((ask) => keyOf(ask) === keyOf(row)));
  const told = asks.map(({ tenant, agent_id, mode, wanted }, at) => {
    return { tenant, agent_id, mode, replica, granted: grants[at]?.granted ?? 0, wanted };
  });
  const written = [...kept, ...told.filter(({ granted, wanted }) => granted > 0 || wanted > 0)];
  if (written.length > 0) await tx.db.insert(t).values(written);
  return grants;
}

function keyOf({ tenant, agent_id, mode }: Pick<PlacesAsk, "tenant" | "agent_id" | "mode">): string {
  return `${agent_id} ${mode} ${tenant}`;
}

/** What one replica has and needs of an agent's places. */
export interface Need {
  readonly granted: number;
  readonly wanted: number;
}

function grantOf(pool: number, kept: number, own: Need, others: readonly Need[]): PlacesGrant {
  const part = fairPart(pool, own, others);
  const left = others.reduce((free, { granted }) => free - granted, pool);
  return { granted: Math.max(kept, Math.min(part, left)), part };
}

/**
 * The part of one replica when none gets more than it needs, and those that need more get alike. Of what can't be divided
 * those that have least get one more, or of several whoever asks first: of a single place they take turns.
 */
export function fairPart(pool: number, own: Need, others: readonly Need[]): number {
  let left = Math.max(pool, 0);
  let all = [own, ...others].sort((a, b) => a.wanted - b.wanted);
  for (let [least] = all; least !== undefined && least.wanted * all.length <= left; [least] = all) {
    if (least === own) return own.wanted;
    left -= least.wanted;
    all = all.slice(1);
  }
  const each = Math.floor(left / all.length);
  const less = all.filter(({ granted }) => granted < own.granted);
  return each + (less.length < left % all.length ? 1 : 0);
}
