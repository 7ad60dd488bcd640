// Limits of settlements under way, shared fairly by tenant: in all, in the background, and in the background at one
// facilitator. A facilitator that let its last attempt time out gets few places, so that it can't hold up the others.
import { createFairShare, type FairShare } from "../../concurrency/fair-share.ts";

/** Each holds two connections, the caller's and the facilitator's, for as long as the facilitator is silent. */
const UNDER_WAY_MAX = 4096;
const IN_BACKGROUND_MAX = 128;
const FACILITATOR_MAX = 32;
const TROUBLED_MAX = 2;
/** Facilitators in trouble that are remembered. Beyond it the oldest is forgotten and gets another chance. */
const TROUBLED_KEPT_MAX = 10_000;

export interface SettlementPermit {
  release(): void;
}

export function createSettlementLimits() {
  const underWay = createFairShare({ size: UNDER_WAY_MAX });
  const background = createFairShare({ size: IN_BACKGROUND_MAX });
  /** Many tenants share a facilitator, and one tenant's waiting payments must not keep the others out. */
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
    /** Counts a settlement of the tenant, in the background or not. */
    enter(tenant: string): SettlementPermit {
      // What was accepted is attempted, whether or not there is room for more.
      const isCounted = underWay.take(tenant) === null;
      return { release: () => isCounted && underWay.giveBack(tenant) };
    },
    /** Whether the tenant has as many settlements under way as it may have. */
    isCrowded: (tenant: string) => underWay.roomOf(tenant) === 0,
    full: () => background.free === 0,
    /** Places in the background that a tenant may still take. */
    ofTenant: (tenant: string) => background.roomOf(tenant),
    /** A place in the background, or null when there is none. */
    take(tenant: string, facilitator: string): SettlementPermit | null {
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
    /** Whether the facilitator's last attempt ended before its time was over. */
    learn(facilitator: string, inTime: boolean) {
      troubled.delete(facilitator);
      if (inTime) return;
      troubled.add(facilitator);
      const [oldest] = troubled;
      if (troubled.size > TROUBLED_KEPT_MAX && oldest !== undefined) troubled.delete(oldest);
    },
  };
}
