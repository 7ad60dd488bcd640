// How long a stranger waits for a gateway that is busy with somebody else.
import { expect } from "bun:test";
import type { Gateway } from "./gateway.ts";

/** The longest answer of the open liveness path, in milliseconds, asked one request after the other while `work` goes on. */
export async function longestWait({ url }: Pick<Gateway, "url">, work: Promise<unknown>): Promise<number> {
  let [isOver, longest] = [false, 0];
  const over = work.finally(() => {
    isOver = true;
  });
  // It is awaited below, and must not count as nobody's until then.
  over.catch(() => {});
  while (!isOver) {
    const askedAt = performance.now();
    const answer = await fetch(`${url}/healthz`);
    await answer.text();
    expect(answer.status).toBe(200);
    longest = Math.max(longest, performance.now() - askedAt);
    await Bun.sleep(1);
  }
  await over;
  return longest;
}
