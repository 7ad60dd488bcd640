// What calls that run take up: a place each, and memory for their bodies. Both are shared out by tenant, and of places an
// agent has a limit of its own.
import { createFairShare, type Shortage } from "../../concurrency/fair-share.ts";
import type { QueueEntry } from "./agent-queue.ts";

/** Bodies that may run outside the shared limit, one per tenant: otherwise small bodies could keep a large one out. */
const BESIDE_MAX = 8;

export interface CallPlacesOptions {
  /** Calls that run at once. */
  readonly places: number;
  /** Of one agent; a function where that changes. */
  readonly agentPlaces: number | (() => number);
  /** Bytes of request bodies that running calls hold in memory. */
  readonly bodyBytes: number;
}

export type CallPlaces = ReturnType<typeof createCallPlaces>;

export function createCallPlaces(options: CallPlacesOptions) {
  const places = createFairShare({ size: options.places, agentMax: options.agentPlaces });
  const bodies = createFairShare({ size: options.bodyBytes, least: 0 });
  const beside = createFairShare({ size: BESIDE_MAX });
  /** The calls whose bodies run outside the shared limit. */
  const besides = new Set<string>();

  function takeBody({ tenant, id, body_bytes }: QueueEntry): Shortage | null {
    const heavy = bodies.take(tenant, null, body_bytes);
    if (heavy === null) return null;
    if (bodies.heldBy(tenant) > 0 || beside.heldBy(tenant) > 0) return heavy;
    const short = beside.take(tenant);
    if (short === null) besides.add(id);
    return short;
  }

  return {
    /** Takes a place and memory for the body, or says which of them is short. */
    take(agentId: string, call: QueueEntry): Shortage | null {
      const short = places.take(call.tenant, agentId);
      if (short !== null) return short;
      const heavy = takeBody(call);
      if (heavy !== null) places.giveBack(call.tenant, agentId);
      return heavy;
    },
    giveBack(agentId: string, { tenant, id, body_bytes }: QueueEntry): void {
      places.giveBack(tenant, agentId);
      if (besides.delete(id)) beside.giveBack(tenant);
      else bodies.giveBack(tenant, null, body_bytes);
    },
    /** The places that the tenant has now, or one of its agents. */
    heldBy: places.heldBy,
    /** How many more the tenant may have now. */
    roomOf: (tenant: string) => places.roomOf(tenant),
  };
}
