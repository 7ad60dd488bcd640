// The connections that wait for another request to the same place.
import { tenantCache } from "../concurrency/tenant-cache.ts";

/** A connection as far as its wait is concerned. */
export interface KeptConnection {
  readonly place: string;
  readonly tenant: string;
  /** Its part of all that may be kept. */
  readonly weight: number;
  /** When it is too old for another request, of performance.now(). */
  readonly idleUntil: number;
  end(): void;
}

/** With a share for each tenant; of a tenant's the one that has waited longest is closed first. */
const IDLE_MAX = 1024;
const SWEEP_MS = 1000;

export class IdleConnections<Connection extends KeptConnection> {
  /** By place, the one that has waited shortest last. */
  readonly #idle = new Map<string, Connection[]>();
  #isSweeping = false;
  readonly #sweepMs: number;
  readonly #kept = tenantCache<Connection, true>(IDLE_MAX, (connection) => connection.end());

  constructor(sweepMs = SWEEP_MS) {
    this.#sweepMs = sweepMs;
  }

  take(place: string): Connection | null {
    const connection = this.#idle.get(place)?.at(-1);
    if (connection === undefined) return null;
    this.#remove(connection);
    if (performance.now() < connection.idleUntil) return connection;
    connection.end();
    return this.take(place);
  }

  isFree(connection: Connection): void {
    const same = this.#idle.get(connection.place);
    if (same === undefined) this.#idle.set(connection.place, [connection]);
    else same.push(connection);
    this.#kept.set(connection.tenant, connection, true, connection.weight);
    this.#sweepLater();
  }

  isOver(connection: Connection): void {
    this.#remove(connection);
  }

  /** One timer for all: one for each wait would cost each call 0.5 µs. Whoever takes a connection looks at its time, too. */
  #sweepLater(): void {
    if (this.#isSweeping || this.#idle.size === 0) return;
    this.#isSweeping = true;
    setTimeout(() => {
      this.#isSweeping = false;
      const now = performance.now();
      const old = [...this.#idle.values()].flat().filter(({ idleUntil }) => idleUntil <= now);
      for (const connection of old) connection.end();
      this.#sweepLater();
    }, this.#sweepMs).unref();
  }

  #remove(connection: Connection): void {
    this.#kept.delete(connection);
    const same = this.#idle.get(connection.place) ?? [];
    const at = same.lastIndexOf(connection);
    if (at >= 0) same.splice(at, 1);
    if (same.length === 0) this.#idle.delete(connection.place);
  }
}
