// Who may run: each running call holds one of its agent's places and one of the process's. Each time that the
// free places halve, the most that an agent may hold is quartered, down to one; so hundreds of agents can be
// stuck with all that they may hold, and the next one still finds a place.

export interface PlaceLimits {
  readonly per_agent: number;
  readonly in_all: number;
  /** Bytes of request bodies that running calls hold in memory; one call always may. */
  readonly body_bytes: number;
}

export interface Places {
  readonly taken: number;
  /**
   * Takes a place for a body of this size. Refused as `own_limit`, the agent has to give one back first; as
   * `short`, anyone has to.
   */
  take(agentId: string, bodyBytes: number): "taken" | "own_limit" | "short";
  release(agentId: string, bodyBytes: number): void;
  /** Whether no agent at all can take a place now. */
  full(): boolean;
}

function mostHeld(limits: PlaceLimits, free: number): number {
  const halvings = Math.floor(Math.log2(limits.in_all / free));
  return Math.max(1, Math.floor(limits.per_agent / 4 ** halvings));
}

export function createPlaces(limits: PlaceLimits): Places {
  const held = new Map<string, number>();
  let taken = 0;
  let bytes = 0;
  return {
    get taken() {
      return taken;
    },
    full: () => taken >= limits.in_all,
    take(agentId, bodyBytes) {
      const own = held.get(agentId) ?? 0;
      const free = limits.in_all - taken;
      if (own >= limits.per_agent) return "own_limit";
      if (free <= 0 || own >= mostHeld(limits, free)) return "short";
      if (taken > 0 && bytes + bodyBytes > limits.body_bytes) return "short";
      held.set(agentId, own + 1);
      taken++;
      bytes += bodyBytes;
      return "taken";
    },
    release(agentId, bodyBytes) {
      const own = (held.get(agentId) ?? 0) - 1;
      if (own > 0) held.set(agentId, own);
      else held.delete(agentId);
      taken--;
      bytes -= bodyBytes;
    },
  };
}
