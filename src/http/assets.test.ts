import { expect, test } from "bun:test";
import { asset, createAssets } from "./assets.ts";

test("an asset that could not be made is made again for the next request, and once for all after that", async () => {
  let tries = 0;
  const serve = createAssets().madeOnce(async () => {
    tries++;
    if (tries === 1) throw new Error("not now");
    return asset("hello", "text/plain");
  });
  const request = () => serve({ request: new Request("http://localhost/") });
  expect(await request().catch((error: Error) => error.message)).toBe("not now");
  const answers = await Promise.all([request(), request()]);
  expect(await Promise.all(answers.map((answer) => answer.text()))).toEqual(["hello", "hello"]);
  expect(tries).toBe(2);
});
