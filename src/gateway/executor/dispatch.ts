// From accepted to ended: claims a call durably, hands it to a worker, records what came back. The database is
// the queue; what is in memory may vanish at any moment without losing or repeating a call.
import type { Clock } from "../../core/clock.ts";
import { Fault } from "../../core/fault.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import {
  type Accepted,
  claim,
  dropLeases,
  type Ending,
  endOrphans,
  finish,
  type InvocationKey,
  nextAgentWithPending,
  type PendingCall,
  pendingOf,
  renewLease,
} from "../invocations/service.ts";
import type { Job } from "./job.ts";
import { Lanes, type Waiting } from "./lanes.ts";
import { createPlaces } from "./places.ts";

const LEASE_MS = 15_000;
const RENEW_MS = 5_000;
const PLACES = 4096;
const RUNNING_BODY_BYTES_MAX = 256 * 1024 * 1024;
const STORE_PAUSE_MS_FIRST = 100;
const STORE_PAUSE_MS_MOST = 5_000;
const LAST_RECORDS_MS = 5_000;

export interface Pool {
  /** Makes the call; resolves to how it ended, whatever happens to the worker. */
  run(job: Job): Promise<Ending & { readonly detail: string | null }>;
  cancel(id: string): void;
  /** Ends what runs. */
  close(): Promise<void>;
}

interface ResolvedCredential {
  readonly header: Job["credential"];
  /** Another one when the secret is another one. */
  readonly version: string;
}

export interface DispatcherOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
  readonly pool: Pool;
  /** This replica's ID, new with each start. */
  readonly replica: string;
  readonly agent_concurrency: number;
  resolveCredential(tenant: string, ref: string): Promise<ResolvedCredential>;
  /** Told of each call that has ended, after it is durable. */
  ended(id: string): void;
}

interface Item extends Waiting {
  readonly inHand?: PendingCall;
}

export class Dispatcher {
  readonly #options: DispatcherOptions;
  readonly #lanes: Lanes<Item>;
  readonly #idle = Promise.withResolvers<void>();
  /** On SQLite this process is the only one; on Postgres there may be other replicas. */
  readonly #shared: boolean;
  #draining = false;
  #givenUp = false;
  #timer: ReturnType<typeof setInterval> | undefined;

  constructor(options: DispatcherOptions) {
    this.#options = options;
    this.#shared = options.store.dialect === "postgres";
    const limits = {
      per_agent: options.agent_concurrency,
      in_all: PLACES,
      body_bytes: RUNNING_BODY_BYTES_MAX,
    };
    this.#lanes = new Lanes<Item>({
      places: createPlaces(limits),
      read: (agentId, limit) => pendingOf(options.store.read, agentId, limit),
      run: (agentId, item) => this.#run(agentId, item),
    });
  }

  /** Ends what a process that is gone left running, and takes up what it left pending. */
  async start(): Promise<void> {
    const { store, clock, log, replica } = this.#options;
    await store.write(async (tx) => {
      if (!this.#shared) await dropLeases(tx, "all");
      await renewLease(tx, replica, clock.now() + LEASE_MS);
    });
    const orphans = await endOrphans(store, clock);
    if (orphans.length > 0) log.warn("ended calls of a process that is gone", { calls: orphans.length });
    await this.#takeUpPending();
    this.#timer = setInterval(() => void this.#keepAlive(), RENEW_MS);
  }

  offer({ row, call, body }: Accepted): void {
    const item = { tenant: row.tenant, id: row.id, body_bytes: body.byteLength };
    this.#lanes.offer(row.agent_id, item, { ...item, inHand: { call, body } });
  }

  /** Stops the upstream call of an invocation, if it runs here. */
  stop(id: string): void {
    this.#options.pool.cancel(id);
  }

  /** Starts nothing more, lets what runs end for `ms`, then ends it. Pending calls stay pending. */
  async drain(ms: number): Promise<void> {
    const { store, pool, replica } = this.#options;
    this.#draining = true;
    this.#lanes.pause();
    if (this.#lanes.running === 0) this.#idle.resolve();
    await Promise.race([this.#idle.promise, Bun.sleep(ms)]);
    await pool.close();
    await Promise.race([this.#idle.promise, Bun.sleep(LAST_RECORDS_MS)]);
    this.#givenUp = true;
    clearInterval(this.#timer);
    await store.write((tx) => dropLeases(tx, replica));
  }

  async #run(agentId: string, item: Item): Promise<void> {
    const fields = { tenant: item.tenant, agent_id: agentId, invocation_id: item.id };
    try {
      await this.#claimAndPerform(agentId, item, fields);
    } catch (error) {
      this.#options.log.error("invocation left as it is", { ...fields, error });
    }
    if (this.#draining && this.#lanes.running === 1) this.#idle.resolve();
  }

  async #claimAndPerform(agentId: string, item: Item, fields: Record<string, string>): Promise<void> {
    const { store, clock, log, replica, ended } = this.#options;
    const key = { tenant: item.tenant, id: item.id };
    const claimed = await this.#untilStored(
      () => store.write((tx) => claim(tx, key, replica, clock.now(), item.inHand ?? null)),
      () => this.#draining,
    );
    // Someone else has it, or it was cancelled.
    if (claimed === null) return;
    const { detail, ...ending } = await this.#perform(agentId, key, claimed);
    const recorded = await this.#untilStored(
      () => store.write((tx) => finish(tx, key, ending, clock.now())),
      () => this.#givenUp,
    );
    if (recorded) {
      const { response: _body, ...shown } = ending;
      log.info("invocation ended", { ...fields, request_id: claimed.call.request_id, ...shown, detail });
    }
    ended(item.id);
  }

  async #perform(agentId: string, key: InvocationKey, { call, body }: PendingCall) {
    const { credential_ref } = call;
    let credential: ResolvedCredential = { header: null, version: "" };
    try {
      if (credential_ref !== null) {
        credential = await this.#untilStored(
          () => this.#options.resolveCredential(key.tenant, credential_ref),
          () => this.#draining,
        );
      }
    } catch (error) {
      this.#options.log.warn("credential not resolved", { ...key, credential_ref, error });
      return { ...NOT_CALLED, detail: "credential not resolved" };
    }
    return await this.#options.pool.run({
      id: key.id,
      agent_id: agentId,
      call,
      credential: credential.header,
      session_key: JSON.stringify([agentId, call.url, credential_ref, credential.version]),
      body,
    });
  }

  /** Repeats a step for as long as the store is away. When it is time to stop, the last error is thrown. */
  async #untilStored<T>(step: () => Promise<T>, stop: () => boolean): Promise<T> {
    for (let pause = STORE_PAUSE_MS_FIRST; ; pause = Math.min(pause * 2, STORE_PAUSE_MS_MOST)) {
      try {
        return await step();
      } catch (error) {
        if (!(error instanceof Fault) || error.kind !== "unavailable" || stop()) throw error;
      }
      await Bun.sleep(pause);
    }
  }

  async #takeUpPending(): Promise<void> {
    const { read } = this.#options.store;
    for (let agent = await nextAgentWithPending(read, ""); agent !== null; ) {
      this.#lanes.look(agent);
      agent = await nextAgentWithPending(read, agent);
    }
  }

  async #keepAlive(): Promise<void> {
    const { store, clock, log, replica, ended } = this.#options;
    try {
      await store.write((tx) => renewLease(tx, replica, clock.now() + LEASE_MS));
      if (!this.#shared) return;
      for (const { id } of await endOrphans(store, clock)) ended(id);
      await this.#takeUpPending();
    } catch (error) {
      log.warn("lease not renewed", { error });
    }
  }
}

const NOT_CALLED = {
  status: "failed",
  error_class: "credential_error",
  upstream_status: null,
  latency_ms: null,
  resp_size: null,
  response: null,
  response_truncated: false,
  response_content_type: null,
} as const;
