// On a bare database, with a small log, so that it starts anew often.
import { Database, type Statement } from "bun:sqlite";
import { afterEach, beforeEach, describe, expect, spyOn, test } from "bun:test";
import { mkdtempSync, rmSync, statSync } from "node:fs";
import { join } from "node:path";
import { temporaryRoot } from "../../../test/support/gateway/process.ts";
import { silentLog } from "../../core/log.ts";
import { startCheckpoints } from "./checkpoints.ts";

const MIB = 1024 * 1024;

describe("checkpoints of SQLite", () => {
  let dir: string;
  let path: string;
  let writer: Database;
  beforeEach(() => {
    dir = mkdtempSync(join(temporaryRoot(), "checkpoints-"));
    path = join(dir, "test.db");
    writer = new Database(path, { create: true });
    writer.run("pragma journal_mode = wal");
    writer.run("pragma wal_autocheckpoint = 0");
    // Groups wait, too, for the moment in which another connection opens the log.
    writer.run("pragma busy_timeout = 5000");
    writer.run("create table bodies (id integer primary key, body blob) strict");
  });
  afterEach(() => {
    writer.close();
    rmSync(dir, { recursive: true });
  });

  const start = (walBytes: number, spawn?: () => Worker) =>
    startCheckpoints({ writer, path, log: silentLog, walBytes, ...(spawn && { spawn }) });

  /** One commit in each turn of the event loop. Gives the size of the log at its largest. */
  async function write(commits: number): Promise<number> {
    const insert = writer.prepare("insert into bodies (body) values (?)");
    let largest = 0;
    for (let i = 0; i < commits; i++) {
      insert.run(Buffer.alloc(64 * 1024, i));
      largest = Math.max(largest, statSync(`${path}-wal`).size);
      await new Promise(setImmediate);
    }
    return largest;
  }

  /** Writes on until the database file itself holds so much. */
  async function writeUntilMoved(bytes: number): Promise<void> {
    const until = performance.now() + 30_000;
    while (statSync(path).size < bytes && performance.now() < until) await write(1);
    expect(statSync(path).size).toBeGreaterThanOrEqual(bytes);
  }

  test("the log starts anew under writes that never pause", async () => {
    const checkpoints = start(MIB);
    let [largest, written] = [0, 0];
    // A busy machine lets the other thread wait, so the writes go on until the log has started anew, were it after 300 MiB only.
    while (written < 300 * MIB && (written < 62 * MIB || largest >= 0.65 * written)) {
      largest = Math.max(largest, await write(100));
      written += 100 * 64 * 1024;
    }
    await checkpoints.stop();
    // All that was written would be the log otherwise.
    expect(largest).toBeLessThan(0.65 * written);
  });

  test("of a large log this thread moves only what has come while the other one moved the rest again and again", async () => {
    const sizes: number[] = [];
    const stands = Object.assign(new EventTarget(), {
      onmessage: null as ((event: MessageEvent) => void) | null,
      unref() {},
      terminate() {},
      postMessage({ kind }: { kind: string }) {
        if (kind === "open") return;
        if (kind === "move") sizes.push(statSync(path).size);
        const data = kind === "move" ? { kind: "move", error: null } : { kind: "close" };
        queueMicrotask(() => stands.onmessage?.(new MessageEvent("message", { data })));
      },
    });
    const checkpoints = start(1, () => stands as unknown as Worker);
    await writeUntilMoved(MIB);
    await checkpoints.stop();
    // Each time the file is as it was, since the stand-in moves nothing.
    expect(sizes.slice(0, 4)).toEqual(Array.from({ length: 4 }, () => sizes[0] ?? -1));
  });

  test("a stop while the thread is at work ends with the thread's word, and does not wait for its time to be over", async () => {
    const asked = Promise.withResolvers<void>();
    const busy = Object.assign(new EventTarget(), {
      onmessage: null as ((event: MessageEvent) => void) | null,
      unref() {},
      terminate() {},
      postMessage({ kind }: { kind: string }) {
        if (kind === "move") asked.resolve();
        if (kind !== "close") return;
        setTimeout(() => busy.onmessage?.(new MessageEvent("message", { data: { kind: "close" } })), 20);
      },
    });
    const checkpoints = start(1024 * MIB, () => busy as unknown as Worker);
    await write(1);
    await asked.promise;
    const begun = performance.now();
    await checkpoints.stop();
    expect(performance.now() - begun).toBeLessThan(1_000);
  });

  test("a log of ordinary size is moved by the thread alone", async () => {
    const prepare = spyOn(writer, "prepare");
    const checkpoints = start(1024 * MIB);
    const at = prepare.mock.calls.findIndex(([text]) => text.startsWith("pragma wal_checkpoint"));
    const moveHere = spyOn(prepare.mock.results[at]?.value as Statement, "run");
    await writeUntilMoved(MIB);
    await checkpoints.stop();
    expect(moveHere).not.toHaveBeenCalled();
  });

  test("the log is moved all the same while no thread can be had", async () => {
    const checkpoints = start(1024 * MIB, () => new Worker(join(dir, "no-such-thread.ts")));
    await writeUntilMoved(MIB);
    await checkpoints.stop();
  });

  test("a thread that has died is replaced", async () => {
    const threads: Worker[] = [];
    const checkpoints = start(1024 * MIB, () => {
      const thread = new Worker(new URL("./checkpoint-thread.ts", import.meta.url).href);
      threads.push(thread);
      return thread;
    });
    await writeUntilMoved(MIB);
    threads[0]?.terminate();
    const until = performance.now() + 30_000;
    while (threads.length < 2 && performance.now() < until) await write(1);
    expect(threads.length).toBe(2);
    await writeUntilMoved(statSync(path).size + MIB);
    await checkpoints.stop();
  });

  test("nothing is lost when the thread is ended in the middle of its work", async () => {
    const checkpoints = start(1024 * MIB);
    await writeUntilMoved(MIB);
    const { n } = writer.query<{ n: number }, []>("select count(*) as n from bodies").get() ?? { n: -1 };
    await write(50);
    await checkpoints.stop();
    writer.close();
    writer = new Database(path);
    expect(writer.query("select count(*) as n from bodies").get()).toEqual({ n: n + 50 });
    expect(writer.query("pragma integrity_check").get()).toEqual({ integrity_check: "ok" });
  });
});
