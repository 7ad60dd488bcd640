// Entry point of a thread that checkpoints an SQLite database on a connection of its own: it moves the write-ahead log into the
// database file. Writers and readers go on meanwhile.
import { Database } from "bun:sqlite";

export type ToCheckpointThread = { readonly kind: "open"; readonly path: string } | { readonly kind: "move" | "close" };

/** The thread has done what it was told. */
export type FromCheckpointThread = { readonly kind: "move" | "close"; readonly error: string | null };

declare const self: Worker;

/** How long to wait for another checkpoint, or for a process that rebuilds the log's index after a crash; nothing else blocks. */
const BUSY_MS = 1_000;

function open(path: string): Database {
  const connection = new Database(path, { readwrite: true });
  connection.run(`pragma busy_timeout = ${BUSY_MS}`);
  connection.run("pragma synchronous = full");
  return connection;
}

function move(connection: Database | null): string | null {
  try {
    connection?.run("pragma wal_checkpoint(passive)");
    return null;
  } catch (error) {
    return error instanceof Error ? error.message : "unknown";
  }
}

function serve(): void {
  let connection: Database | null = null;
  self.onmessage = ({ data }: MessageEvent<ToCheckpointThread>) => {
    if (data.kind === "open") {
      connection = open(data.path);
      return;
    }
    const error = data.kind === "move" ? move(connection) : null;
    if (data.kind === "close") connection?.close();
    self.postMessage({ kind: data.kind, error } satisfies FromCheckpointThread);
  };
}

serve();
