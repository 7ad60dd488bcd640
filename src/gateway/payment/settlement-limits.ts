// How many settlements may be under way, shared out by tenant: in all, in the background, and there at one facilitator,
// which gets few places when it let the last attempt run out of time, so that one in trouble holds up nobody else's.
import { createFairShare, type FairShare } from "../../concurrency/fair-share.ts";

/** Each holds two connections, the caller's and the facilitator's, for as long as that one likes to be silent. */
const UNDER_WAY_MAX = 4096;
const IN_BACKGROUND_MAX = 128;
const FACILITATOR_MAX = 32;
const TROUBLED_MAX = 2;
/** Names of facilitators in trouble that are kept; beyond it the oldest gets another chance. */
const TROUBLED_KEPT_MAX = 10_000;

export interface SettlementPermit {
  release(): void;
}

export interface SettlementLimits {
  /** Counts a settlement of the tenant, in the background or not. */
  enter(tenant: string): SettlementPermit;
  /** Whether another call of the tenant would be one too many. */
  isCrowded(tenant: string): boolean;
  full(): boolean;
  /** Places in the background that a tenant may still take. */
  ofTenant(tenant: string): number;
  /** A place in the background, or null when there is none. */
  take(tenant: string, facilitator: string): SettlementPermit | null;
  /** Whether the facilitator's last attempt ended before its time was over. */
  learn(facilitator: string, inTime: boolean): void;
}

export function createSettlementLimits(): SettlementLimits {
  const underWay = createFairShare({ size: UNDER_WAY_MAX });
  const background = createFairShare({ size: IN_BACKGROUND_MAX });
  /** Many tenants share one, and what it keeps waiting of one is not to keep the others out. */
  const byFacilitator = new Map<string, FairShare>();
  const troubled = new Set<string>();

  function takeAt(facilitator: string, tenant: string): FairShare | null {
    const places = byFacilitator.get(facilitator) ?? createFairShare({ size: FACILITATOR_MAX });
    const isTried = troubled.has(facilitator) && FACILITATOR_MAX - places.free >= TROUBLED_MAX;
    if (isTried || places.take(tenant) !== null) return null;
    byFacilitator.set(facilitator, places);
    return places;
  }

  return {
    enter(tenant) {
      // What was accepted is attempted, whether or not there is room for more.
      const isCounted = underWay.take(tenant) === null;
      return { release: () => isCounted && underWay.giveBack(tenant) };
    },
    isCrowded: (tenant) => underWay.roomOf(tenant) === 0,
    full: () => background.free === 0,
    ofTenant: (tenant) => background.roomOf(tenant),
    take(tenant, facilitator) {
      const places = takeAt(facilitator, tenant);
      if (places === null) return null;
      const giveBack = () => {
        places.giveBack(tenant);
        if (places.free === FACILITATOR_MAX) byFacilitator.delete(facilitator);
      };
      if (background.take(tenant) !== null) {
        giveBack();
        return null;
      }
      return {
        release() {
          background.giveBack(tenant);
          giveBack();
        },
      };
    },
    learn(facilitator, inTime) {
      troubled.delete(facilitator);
      if (inTime) return;
      troubled.add(facilitator);
      const [oldest] = troubled;
      if (troubled.size > TROUBLED_KEPT_MAX && oldest !== undefined) troubled.delete(oldest);
    },
  };
}
