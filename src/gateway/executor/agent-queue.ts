// What is in memory of one agent's pending calls, and what is known of those that are only in the database: whether there
// are any, and behind which ID. Pure: who takes calls from the database, and who starts them, is said elsewhere.
export interface QueueEntry {
  readonly tenant: string;
  readonly id: string;
  readonly body_bytes: number;
}

export const LENGTH_MAX = 256;

export class AgentQueue<W extends QueueEntry> {
  readonly tenant: string;
  readonly agentId: string;
  readonly #waiting: W[] = [];
  /** Calls of this queue that hold a slot: started, and not yet ended. */
  readonly #started = new Set<string>();
  /** Whether the database may hold calls that are neither waiting nor started. */
  #more = false;
  #isTaking = false;
  /** Calls that were offered while others are being taken, which may or may not be among those. */
  #offered: W[] = [];
  /** The oldest call that was offered meanwhile and not kept. */
  #leftOut: string | null = null;
  /** The calls that were last taken in a block, and the last of them. */
  #block: ReadonlySet<string> = new Set();
  #last = "";
  /** Whether there may be calls older than that. */
  #fromStart = true;
  /** Whether others may take what is pending too. */
  isShared = false;

  constructor(tenant: string, agentId: string) {
    this.tenant = tenant;
    this.agentId = agentId;
  }

  /** The call that starts next. */
  get next(): W | undefined {
    return this.#waiting[0];
  }

  /** How many calls it keeps in memory. */
  get length(): number {
    return this.#waiting.length + this.#offered.length;
  }

  /** All of the agent's pending calls are in this queue. */
  get complete(): boolean {
    return !this.#more && !this.#isTaking;
  }

  /** A call that comes now is the next one. */
  get isDry(): boolean {
    return this.complete && this.#waiting.length === 0;
  }

  get empty(): boolean {
    return this.isDry && this.#started.size === 0;
  }

  /** Whether the database is to be asked for more. */
  get wantsMore(): boolean {
    return this.#more && !this.#isTaking;
  }

  /** The ID behind which calls have not been looked at. */
  get last(): string {
    return this.#last;
  }

  /**
   * Keeps the call in memory if all that are older are there, or are being taken, and says so. Else it is found in the
   * database.
   */
  keep(item: W, hasRoom: boolean): boolean {
    const list = this.#isTaking ? this.#offered : this.#waiting;
    const isKept = hasRoom && !this.#more && list.length < LENGTH_MAX;
    if (isKept) list.push(item);
    else {
      this.#more = true;
      this.#fromStart ||= item.id < this.#last;
      if (this.#leftOut === null || item.id < this.#leftOut) this.#leftOut = item.id;
    }
    return isKept;
  }

  /** There may be calls in the database that were never offered, and others may have left them. */
  lookAgain(): void {
    this.#more = true;
    this.#fromStart = true;
    this.isShared = false;
  }

  /** A call has a slot. */
  start({ id }: QueueEntry): void {
    this.#started.add(id);
  }

  /** The next call has a slot. */
  startNext(): void {
    const next = this.#waiting.shift();
    if (next !== undefined) this.start(next);
  }

  /** A call has given its slot back. */
  end({ id }: QueueEntry): void {
    this.#started.delete(id);
  }

  /** A block is about to be taken: of the calls behind this ID. */
  beginTaking(): string {
    this.#isTaking = true;
    // Cleared before, so that a look meanwhile sets them again.
    this.#more = false;
    const after = this.#fromStart ? "" : this.#last;
    this.#fromStart = false;
    this.#leftOut = null;
    return after;
  }

  /** These have been taken, the oldest first. */
  took(taken: readonly W[]): void {
    this.#block = new Set(taken.map(({ id }) => id));
    this.#last = taken.at(-1)?.id ?? this.#last;
  }

  /** All of the agent's pending calls are to be looked at, from the oldest. */
  fromTheStart(): void {
    this.#fromStart = true;
  }

  /**
   * The end of taking. If all that is pending is in memory now, what was offered meanwhile waits there too; else in the
   * database.
   *
   * @param next the oldest of what is still pending
   */
  goOn(next: readonly W[], hasMore: boolean): void {
    const offered = this.#offered;
    const leftOut = this.#leftOut;
    this.#offered = [];
    this.#isTaking = false;
    // The block may have been looked for before these were stored.
    const isMissed =
      offered.some(({ id }) => id < this.#last && !this.#block.has(id)) || (leftOut !== null && leftOut < this.#last);
    this.#fromStart ||= isMissed;
    this.#more ||= hasMore || isMissed;
    const known = new Set([...this.#started, ...next.map(({ id }) => id)]);
    const others = this.#more ? [] : offered.filter(({ id }) => id > this.#last && !known.has(id));
    this.#waiting.push(...next.filter(({ id }) => !this.#started.has(id)), ...others);
  }
}
