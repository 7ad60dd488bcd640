// Calls accepted, made and recorded: the gateway's and Restate's, one right after the other.
import { DATABASES } from "../databases.ts";
import { wholeCalls } from "../measure.ts";
import type { Report } from "../report.ts";
import { openGateway, quickUpstream } from "../targets.ts";
import { startRestate } from "./restate.ts";

/** @param seconds of each load; what is left of it then is done before the clock is read */
export async function calls(seconds: number, report: Report): Promise<void> {
  let visits = 0;
  await using upstream = quickUpstream(() => visits++);
  const floor = await (async () => {
    await using restate = await startRestate(upstream.url, () => visits);
    const { figures, note } = await wholeCalls(restate, seconds, restate.left);
    return report.add("Restate 1.7.12: accepted, called, recorded", figures, {
      note: `CPU with that of its service; log with fsync ${note}`,
    });
  })();
  for (const open of DATABASES) {
    const database = await open();
    await using target = await openGateway(database, { upstream });
    const left = async () => (await target.total("pending")) + (await target.total("running"));
    const { figures, note } = await wholeCalls(target, seconds, left);
    report.add(`accepted, called, recorded, ${database.name}`, figures, { floor: [floor, "rate"], note });
  }
}
