// Entry point of a thread with a connection of its own that moves the log of a SQLite database into the database file.
// Writers and readers go on meanwhile.
// One per thread, since this is the thread.
import { Database } from "bun:sqlite";

export type ToCheckpointThread = { readonly kind: "open"; readonly path: string } | { readonly kind: "move" | "close" };

export type FromCheckpointThread =
  | { readonly kind: "moved"; readonly error: string | null }
  | { readonly kind: "closed" };

declare const self: Worker;

/** Only a process that rebuilds the index of the log after a crash, or another checkpoint, is waited for. */
const BUSY_MS = 1_000;

let connection: Database | null = null;

function move(): string | null {
  try {
    connection?.run("pragma wal_checkpoint(passive)");
    return null;
  } catch (error) {
    return error instanceof Error ? error.message : "unknown";
  }
}

function post(message: FromCheckpointThread): void {
  self.postMessage(message);
}

self.onmessage = ({ data }: MessageEvent<ToCheckpointThread>) => {
  switch (data.kind) {
    case "open":
      connection = new Database(data.path, { readwrite: true });
      connection.run(`pragma busy_timeout = ${BUSY_MS}`);
      connection.run("pragma synchronous = full");
      break;
    case "move":
      post({ kind: "moved", error: move() });
      break;
    case "close":
      connection?.close();
      connection = null;
      post({ kind: "closed" });
      break;
  }
};
