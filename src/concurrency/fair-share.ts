// How something that there is only so much of (places, bytes of memory) is shared out: by tenant first, then by agent.
// What one may hold falls with the square of what it leaves free. So a tenant alone gets seven eighths; those that ask
// for more than there is get the same; and whoever comes next finds something, however many hold all that they may.

export interface FairShareOptions {
  /** All that there is: a count, or bytes. */
  readonly size: number;
  /** The most that one agent holds, however much is free. */
  readonly agentMax?: number;
  /** What a holder of nothing may take of what is free, however little that is: one place, but no bytes. */
  readonly least?: 0 | 1;
}

/**
 * Who has to give something back first. `own`: the agent, which holds all that one agent may; `agent`: any agent of
 * the tenant; `tenant`: any tenant.
 */
export type Shortage = "own" | "agent" | "tenant";

export interface FairShare {
  readonly free: number;
  /**
   * Takes this amount, or says who is short; then nothing is taken. Without an agent only the tenant counts.
   *
   * @param part where it is given, a tenant may hold so much, whatever it leaves free, and no more
   */
  take(tenant: string, agent?: string | null, amount?: number, part?: number | null): Shortage | null;
  giveBack(tenant: string, agent?: string | null, amount?: number): void;
  /** How much more the tenant may hold now, or as soon as so much is given back by others. */
  roomOf(tenant: string, part?: number | null, comesBack?: number): number;
  /** Those that hold something. */
  tenants(): Iterable<string>;
  /** What the tenant holds now, or one of its agents. */
  heldBy(tenant: string, agent?: string): number;
}

/** So steep that one alone keeps an eighth free: (8 - 1) * 8. */
const STEEPNESS = 56;

interface Holder {
  held: number;
  readonly agents: Map<string, number>;
}

const NOBODY: Holder = { held: 0, agents: new Map() };

/**
 * The most that one may hold of `size`, of which the others leave it `left`: as much as STEEPNESS * kept² / size, where
 * `kept` is what it keeps free of that.
 */
function mostHeld(size: number, left: number): number {
  if (left <= 0) return 0;
  const kept = (size * (Math.sqrt(1 + (4 * STEEPNESS * left) / size) - 1)) / (2 * STEEPNESS);
  return Math.floor(left - kept);
}

export function createFairShare({ size, agentMax = size, least = 1 }: FairShareOptions): FairShare {
  const holders = new Map<string, Holder>();
  let free = size;

  /** The more it holds, the less is free: what both are together is what the others leave it. */
  const mostOf = (whole: number, left: number) => Math.max(Math.min(least, left), mostHeld(whole, left));

  const mostOfTenant = (left: number, part: number | null) =>
    part === null ? mostOf(size, left) : Math.min(part, left);

  function shortage(
    { held, agents }: Holder,
    agent: string | null,
    amount: number,
    part: number | null,
  ): Shortage | null {
    const own = agents.get(agent ?? "") ?? 0;
    if (own + amount > agentMax) return "own";
    // What is too much for anybody's share can be had while nobody holds anything.
    const isAlone = free === size && amount <= size;
    if (isAlone || amount === 0) return null;
    const tenantMost = mostOfTenant(free + held, part);
    if (held + amount > tenantMost) return "tenant";
    // Likewise among agents: one alone may need all that its tenant may hold.
    const isOnly = agent === null || held === 0;
    const whole = part ?? tenantMost;
    return isOnly || own + amount <= mostOf(whole, whole - held + own) ? null : "agent";
  }

  function giveBackOf({ agents }: Holder, agent: string, amount: number): void {
    const left = (agents.get(agent) ?? 0) - amount;
    if (left > 0) agents.set(agent, left);
    else agents.delete(agent);
  }

  return {
    get free() {
      return free;
    },
    take(tenant, agent = null, amount = 1, part = null) {
      const found = holders.get(tenant);
      const short = shortage(found ?? NOBODY, agent, amount, part);
      if (short !== null) return short;
      const holder = found ?? { held: 0, agents: new Map<string, number>() };
      if (found === undefined) holders.set(tenant, holder);
      holder.held += amount;
      if (agent !== null) holder.agents.set(agent, (holder.agents.get(agent) ?? 0) + amount);
      free -= amount;
      return null;
    },
    giveBack(tenant, agent = null, amount = 1) {
      const holder = holders.get(tenant);
      if (holder === undefined) return;
      if (agent !== null) giveBackOf(holder, agent, amount);
      holder.held -= amount;
      if (holder.held <= 0) holders.delete(tenant);
      free += amount;
    },
    roomOf(tenant, part = null, comesBack = 0) {
      const held = holders.get(tenant)?.held ?? 0;
      return Math.max(0, mostOfTenant(free + comesBack + held, part) - held);
    },
    tenants: () => holders.keys(),
    heldBy(tenant, agent) {
      const holder = holders.get(tenant);
      return (agent === undefined ? holder?.held : holder?.agents.get(agent)) ?? 0;
    },
  };
}

/** Who is served first: of those that hold the same, the one that stands first in `names`. */
export function leastFirst<N>(names: Iterable<N>, held: (name: N) => number): N[] {
  return [...names].sort((a, b) => held(a) - held(b));
}
