// How many settlements may be under way: all of a tenant, and those in the background in all, for a tenant, and for a
// facilitator. One that let the last attempt run out of time gets few places, so that a facilitator in trouble holds
// up nobody else's payments.

/** Each holds two connections, the caller's and the facilitator's, for as long as that one likes to be silent. */
const UNDER_WAY_MAX = 2048;
/** Of all tenants that share a facilitator: one that hangs holds no more than this. */
const FACILITATOR_UNDER_WAY_MAX = 4096;
const IN_ALL_MAX = 128;
const TENANT_MAX = 16;
const FACILITATOR_MAX = 32;
const TROUBLED_MAX = 2;
/** Names of facilitators in trouble that are kept; beyond it the oldest gets another chance. */
const TROUBLED_KEPT_MAX = 10_000;

export interface Place {
  release(): void;
}

export interface Room {
  /** Counts a settlement of the tenant at its facilitator, in the background or not. */
  enter(tenant: string, facilitator: string): Place;
  /** Whether another call of the tenant would be one too many, for it or for the facilitator. */
  isCrowded(tenant: string, facilitator: string): boolean;
  full(): boolean;
  /** Free places of a tenant. */
  ofTenant(tenant: string): number;
  /** A place, or null when there is none. */
  take(tenant: string, facilitator: string): Place | null;
  /** Whether the facilitator's last attempt ended before its time was over. */
  learn(facilitator: string, inTime: boolean): void;
}

export function createRoom(): Room {
  const underWay = new Map<string, number>();
  const underWayAt = new Map<string, number>();
  const byTenant = new Map<string, number>();
  const byFacilitator = new Map<string, number>();
  const troubled = new Set<string>();
  let inAll = 0;

  function add(counts: Map<string, number>, name: string, delta: 1 | -1): void {
    const count = (counts.get(name) ?? 0) + delta;
    if (count === 0) counts.delete(name);
    else counts.set(name, count);
  }

  const ofTenant = (tenant: string) => TENANT_MAX - (byTenant.get(tenant) ?? 0);
  const ofFacilitator = (facilitator: string) =>
    (troubled.has(facilitator) ? TROUBLED_MAX : FACILITATOR_MAX) - (byFacilitator.get(facilitator) ?? 0);

  return {
    enter(tenant, facilitator) {
      const change = (delta: 1 | -1) => {
        add(underWay, tenant, delta);
        add(underWayAt, facilitator, delta);
      };
      change(1);
      return { release: () => change(-1) };
    },
    isCrowded: (tenant, facilitator) =>
      (underWay.get(tenant) ?? 0) >= UNDER_WAY_MAX ||
      (underWayAt.get(facilitator) ?? 0) >= FACILITATOR_UNDER_WAY_MAX,
    full: () => inAll >= IN_ALL_MAX,
    ofTenant,
    take(tenant, facilitator) {
      if (inAll >= IN_ALL_MAX || ofTenant(tenant) <= 0 || ofFacilitator(facilitator) <= 0) return null;
      const change = (delta: 1 | -1) => {
        inAll += delta;
        add(byTenant, tenant, delta);
        add(byFacilitator, facilitator, delta);
      };
      change(1);
      return { release: () => change(-1) };
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
