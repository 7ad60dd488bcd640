// What is in memory of one agent's pending calls.
export interface QueueEntry {
  readonly tenant: string;
  readonly id: string;
  readonly body_bytes: number;
}

export class AgentQueue<W extends QueueEntry> {
  readonly tenant: string;
  readonly agentId: string;
  readonly waiting: W[] = [];
  /** Calls of this queue that hold a place: started, and not yet ended. */
  readonly started = new Set<string>();
  /** Whether the database may hold calls that are neither waiting nor started. */
  more = false;
  isTaking = false;

  constructor(tenant: string, agentId: string) {
    this.tenant = tenant;
    this.agentId = agentId;
  }

  /** All of the agent's pending calls are in this queue. */
  get complete(): boolean {
    return !this.more && !this.isTaking;
  }

  get empty(): boolean {
    return this.complete && this.waiting.length === 0 && this.started.size === 0;
  }
}
