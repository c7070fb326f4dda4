"""The same texts in seven languages: as many probe queries, in every shape, and the words that BM25 finds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from revela_hub.evaluation import build_probe
from revela_hub.evaluation.probe import ProbeSettings
from revela_hub.evaluation.query_shapes import QueryShape
from revela_hub.retrieval import BM25, BM25Settings

PLACES = {
    "English": "harbour|market|library|museum|bridge|school|station|garden|theatre|temple",
    "German": "Hafen|Marktplatz|Bücherei|Museum|Brücke|Schule|Bahnhof|Garten|Theater|Tempel",
    "Korean": "항구|시장|도서관|박물관|다리|학교|기차역|정원|극장|사원",
    "Chinese": "港口|市场|图书馆|博物馆|大桥|学校|车站|花园|剧院|寺庙",
    "Japanese": "港|市場|図書館|博物館|橋|学校|駅|庭園|劇場|寺院",
    "Thai": "ท่าเรือ|ตลาด|ห้องสมุด|พิพิธภัณฑ์|สะพาน|โรงเรียน|สถานี|สวน|โรงละคร|วัด",
    "Hindi": "बंदरगाह|बाज़ार|पुस्तकालय|संग्रहालय|पुल|विद्यालय|स्टेशन|बगीचा|रंगमंच|मंदिर",
}
THINGS = {
    "English": "stone|wood|brick|copper|glass|marble",
    "German": "Stein|Holz|Ziegel|Kupfer|Glas|Marmor",
    "Korean": "돌|나무|벽돌|구리|유리|대리석",
    "Chinese": "石头|木头|砖块|铜|玻璃|大理石",
    "Japanese": "石|木材|煉瓦|銅|硝子|大理石",
    "Thai": "หิน|ไม้|อิฐ|ทองแดง|แก้ว|หินอ่อน",
    "Hindi": "पत्थर|लकड़ी|ईंट|ताँबा|काँच|संगमरमर",
}
SENTENCES = {
    "English": [
        "The old {place} of district {n} was built of {thing} by the people who lived along the river. ",
        "In the year {year} a heavy storm damaged the roof, and the walls of {other} had to be repaired. ",
        "Visitors from district {n} come in the morning because the light on the {thing} is best then. ",
        "The council of the town pays {price} coins a year so that the {place} stays open to everybody.",
    ],
    "German": [
        "Das alte Gebäude {place} im Bezirk {n} wurde von den Bewohnern am Fluss aus {thing} gebaut. ",
        "Im Jahr {year} beschädigte ein schwerer Sturm das Dach, und die Mauern aus {other} mussten erneuert werden. ",
        "Besucher aus dem Bezirk {n} kommen am Morgen, weil dann das Licht auf {thing} am schönsten ist. ",
        "Der Rat der Stadt zahlt {price} Münzen im Jahr, damit der Ort {place} für alle offen bleibt.",
    ],
    "Korean": [
        "{n} 구역의 오래된 {place}은 강가에 살던 사람들이 {thing}으로 힘을 모아 오랜 시간에 걸쳐 지었다. ",
        "{year} 년에 큰 폭풍이 지붕을 무너뜨렸고 {other}으로 만든 벽도 여러 해 동안 다시 고쳐야 했다. ",
        "{n} 구역에서 오는 방문객들은 {thing}에 비치는 빛이 가장 아름다운 이른 아침에 주로 이곳을 찾아온다. ",
        "시 의회는 {place}이 모든 사람에게 열려 있도록 해마다 동전 {price} 개를 관리 비용으로 낸다.",
    ],
    "Chinese": [
        "第{n}区古老的{place}是住在河边的人们用{thing}建造的。",
        "{year}年一场大风暴毁坏了屋顶，{other}做的墙也不得不修理。",
        "来自第{n}区的游客喜欢在早晨参观，因为那时{thing}上的光线最美。",
        "市议会每年支付{price}枚硬币，让{place}对所有人开放。",
    ],
    "Japanese": [
        "第{n}区の古い{place}は川沿いに住む人々が{thing}で建てたものです。",
        "{year}年に大きな嵐が屋根を壊し、{other}の壁も修理しなければなりませんでした。",
        "第{n}区からの観光客は{thing}に当たる光が最も美しい朝に訪れます。",
        "市議会は{place}がすべての人に開かれているように毎年{price}枚の硬貨を支払います。",
    ],
    "Thai": [
        "{place}เก่าแก่ของเขต{n}สร้างด้วย{thing}โดยผู้คนที่อาศัยอยู่ริมแม่น้ำ ",
        "ในปี{year}พายุใหญ่ทำให้หลังคาเสียหายและกำแพง{other}ต้องได้รับการซ่อมแซม ",
        "นักท่องเที่ยวจากเขต{n}มาในตอนเช้าเพราะแสงบน{thing}สวยที่สุดในเวลานั้น ",
        "สภาเมืองจ่ายเงินปีละ{price}เหรียญเพื่อให้{place}เปิดสำหรับทุกคน",
    ],
    "Hindi": [
        "क्षेत्र {n} का पुराना {place} नदी के किनारे रहने वाले लोगों ने {thing} से बनाया था। ",
        "वर्ष {year} में एक भारी तूफ़ान ने छत को तोड़ दिया और {other} की दीवारें भी ठीक करनी पड़ीं। ",
        "क्षेत्र {n} के यात्री सुबह आते हैं क्योंकि तब {thing} पर पड़ने वाला प्रकाश सबसे सुंदर होता है। ",
        "नगर की परिषद हर साल {price} सिक्के देती है ताकि {place} सबके लिए खुला रहे।",
    ],
}


def documents(language: str) -> list[str]:
    places, things = PLACES[language].split("|"), THINGS[language].split("|")
    return [
        "".join(SENTENCES[language]).format(
            place=places[i % 10],
            thing=things[i % 6],
            other=things[(i // 10 + i + 1) % 6],
            n=11 + i,
            year=1820 + 3 * i,
            price=400 + 7 * i,
        )
        for i in range(60)
    ]


@pytest.fixture
def probe_queries(tmp_path: Path) -> Callable[[str, QueryShape], list[str]]:
    def make(language: str, shape: QueryShape) -> list[str]:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents(language)))
        return list(build_probe(str(file), ProbeSettings(shape=shape)).task.queries.values())

    return make


@pytest.mark.parametrize("language", SENTENCES)
def test_every_language_has_queries(language: str, probe_queries: Callable[[str, QueryShape], list[str]]) -> None:
    text = "".join(documents(language))
    whole = probe_queries(language, "whole")
    assert len(whole) > 36  # of 60 documents
    for shape in get_args(QueryShape):
        queries = probe_queries(language, shape)
        assert len(queries) == len(whole)
        if shape == "short":
            assert all(query in text for query in queries)
            assert sum(map(len, queries)) < 0.8 * sum(map(len, whole))
        # No word is cut at a combining mark.
        marks = "\u093c\u093e\u093f\u0940\u0941\u0942\u0947\u0948\u094b\u094c\u094d\u0902\u0901"
        assert all(word[0] not in marks for query in queries for word in query.split())


@pytest.mark.parametrize("language", SENTENCES)
def test_bm25_finds_ten_words(language: str) -> None:
    index = BM25(documents(language), BM25Settings(stemmer="none"))
    for number, word in enumerate(PLACES[language].split("|")):
        [hits] = index.search([word], 60).rows_QK
        assert hits[0] % 10 == number and set(range(number, 60, 10)) <= set(hits.tolist()), word
