// What is in memory of one agent's pending calls.
export interface QueueEntry {
  readonly tenant: string;
  readonly id: string;
  readonly body_bytes: number;
}

export const LENGTH_MAX = 256;

export class AgentQueue<W extends QueueEntry> {
  readonly tenant: string;
  readonly agentId: string;
  readonly waiting: W[] = [];
  /** Calls of this queue that hold a place: started, and not yet ended. */
  readonly started = new Set<string>();
  /** Whether the database may hold calls that are neither waiting nor started. */
  more = false;
  isTaking = false;
  /** Calls that were offered while others are being taken, which may or may not be among those. */
  offered: W[] = [];
  /** The calls that were last taken in a block, and the last of them. */
  block: ReadonlySet<string> = new Set();
  last = "";
  /** Whether there may be calls older than that. */
  fromStart = true;
  /** Whether others may take what is pending too. */
  isShared = false;

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

  /** Keeps the call in memory if all that are older are there, or are being taken. */
  keep(item: W): boolean {
    const list = this.isTaking ? this.offered : this.waiting;
    const isKept = !this.more && list.length < LENGTH_MAX;
    if (isKept) list.push(item);
    return isKept;
  }
}
