// Answer bytes that have arrived and are not taken yet, because their readers wait for memory or for a caller that does
// not read. A connection delivers what it has in one go, half a megabyte and more, so thousands of them would fill the
// memory before any could be paused. So each tenant has a share. When it is used up, none of the tenant's connections is
// read, head or body, until some of it is taken; what is not read stays with its sender.
import { createFairShare, type FairShare } from "../../kernel/share.ts";

/** How a connection is paused. Both may be called again. */
export interface Source {
  pause(): void;
  resume(): void;
}

export type ReadAhead = ReturnType<typeof createReadAhead>;

/** The part of one answer in it. */
export interface AnswerReadAhead {
  /** From now on this connection brings the answer. */
  open(source: Source): void;
  /** Counts what has arrived; a negative number is what has been taken of it. */
  add(bytes: number): void;
  /** The answer is read on, whatever the share: its reader holds memory that others wait for. */
  exempt(): void;
  /** The connection brings nothing more, and nothing that came is left. */
  close(): void;
}

/** How many are resumed at a time, since each may have much to deliver. */
const RESUMED_AT_ONCE = 16;

interface UnreadAnswer {
  readonly source: Source;
  readonly tenant: string;
  /** What has arrived and is not taken, and how much of it the share had room for. The rest has arrived all the same. */
  bytes: number;
  charged: number;
  isExempt: boolean;
}

/** The answers of a tenant that are arriving. */
interface TenantAnswers {
  readonly read: Set<UnreadAnswer>;
  readonly stopped: Set<UnreadAnswer>;
  /** What has come of all of them and is not taken. */
  bytes: number;
}

class Gate {
  readonly #share: FairShare;
  readonly #tenants = new Map<string, TenantAnswers>();
  /** The tenants of which some are stopped. */
  readonly #short = new Set<string>();
  #isScheduled = false;

  constructor(bytesMax: number) {
    this.#share = createFairShare({ size: bytesMax, least: 0 });
  }

  get inUse(): number {
    return this.#share.inUse;
  }

  enter(account: UnreadAnswer): void {
    const tenant = this.#tenants.get(account.tenant) ?? { read: new Set(), stopped: new Set(), bytes: 0 };
    this.#tenants.set(account.tenant, tenant);
    const isStopped = this.#short.has(account.tenant) && !account.isExempt;
    (isStopped ? tenant.stopped : tenant.read).add(account);
    if (isStopped) account.source.pause();
  }

  leave(account: UnreadAnswer): void {
    const tenant = this.#tenants.get(account.tenant);
    tenant?.read.delete(account);
    tenant?.stopped.delete(account);
    this.charge(account, -account.bytes);
    if (tenant?.read.size === 0 && tenant.stopped.size === 0) this.#tenants.delete(account.tenant);
  }

  charge(account: UnreadAnswer, bytes: number): void {
    const { tenant } = account;
    account.bytes += bytes;
    const all = this.#tenants.get(tenant);
    if (all !== undefined) all.bytes += bytes;
    if (bytes > 0) {
      const taken = Math.min(bytes, this.#share.roomOf(tenant));
      if (taken > 0) this.#share.take(tenant, null, taken);
      account.charged += taken;
      if (taken < bytes) this.#stopAll(tenant);
      return;
    }
    const back = account.charged - account.bytes;
    if (back > 0) {
      account.charged -= back;
      this.#share.giveBack(tenant, null, back);
    }
    this.#resumeSoon();
  }

  exempt(account: UnreadAnswer): void {
    account.isExempt = true;
    const tenant = this.#tenants.get(account.tenant);
    if (tenant?.stopped.has(account)) resume(tenant, account);
  }

  #stopAll(name: string): void {
    const tenant = this.#tenants.get(name);
    if (tenant === undefined) return;
    for (const account of tenant.read) {
      if (account.isExempt) continue;
      tenant.read.delete(account);
      tenant.stopped.add(account);
      account.source.pause();
    }
    if (tenant.stopped.size > 0) this.#short.add(name);
  }

  #resumeSoon(): void {
    if (this.#isScheduled || this.#short.size === 0) return;
    this.#isScheduled = true;
    setImmediate(() => this.#resumeSome());
  }

  #resumeSome(): void {
    this.#isScheduled = false;
    let isMore = false;
    for (const name of this.#short) {
      const tenant = this.#tenants.get(name);
      if (tenant === undefined || tenant.stopped.size === 0) this.#short.delete(name);
      else if (this.#resumeOf(name, tenant)) isMore = true;
    }
    if (isMore) this.#resumeSoon();
  }

  /** If nothing of the tenant is left to be taken, one is resumed whatever others hold: it waits for no other tenant. */
  #resumeOf(name: string, tenant: TenantAnswers): boolean {
    // A tenant is read again when it may have this much more.
    const hasRoom = this.#share.roomOf(name) >= 64 * 1024;
    if (!hasRoom && tenant.bytes > 0) return false;
    let left = hasRoom ? RESUMED_AT_ONCE : 1;
    for (const account of tenant.stopped) {
      if (left-- === 0) break;
      resume(tenant, account);
    }
    return true;
  }
}

function resume({ read, stopped }: TenantAnswers, account: UnreadAnswer): void {
  stopped.delete(account);
  read.add(account);
  account.source.resume();
}

class Account implements AnswerReadAhead {
  readonly #gate: Gate;
  readonly #tenant: string;
  #answer: UnreadAnswer | null = null;

  constructor(gate: Gate, tenant: string) {
    this.#gate = gate;
    this.#tenant = tenant;
  }

  open(source: Source): void {
    this.close();
    this.#answer = { source, tenant: this.#tenant, bytes: 0, charged: 0, isExempt: false };
    this.#gate.enter(this.#answer);
  }

  add(bytes: number): void {
    if (this.#answer !== null) this.#gate.charge(this.#answer, bytes);
  }

  exempt(): void {
    if (this.#answer !== null) this.#gate.exempt(this.#answer);
  }

  close(): void {
    if (this.#answer !== null) this.#gate.leave(this.#answer);
    this.#answer = null;
  }
}

export function createReadAhead(bytesMax: number) {
  const gate = new Gate(bytesMax);
  return { of: (tenant: string): AnswerReadAhead => new Account(gate, tenant), inUse: () => gate.inUse };
}
