// A long document that shows the effect of the cache, and questions about it.

const DOCUMENT = `You answer questions about the handbook below. Answer in one or two sentences, with the facts of the handbook only.

THE HARBOUR LIBRARY: A HANDBOOK FOR MEMBERS AND STAFF

1. The house
The Harbour Library stands on the old customs quay, in the brick house that was built in 1874 to weigh and tax the cargo of sailing ships. The scales are still there: they fill the entrance hall, and children may stand on them. The reading room is on the first floor, with eleven windows towards the water. The map room, the archive and the workshop are on the second floor. The cellar floods about once in four years, so nothing but garden chairs is kept there. A lift goes from the hall to all floors; it holds four people or one person with a wheelchair.

2. Opening hours
The library is open from Tuesday to Friday from 10 in the morning to 7 in the evening, on Saturday from 9 to 4, and on Sunday from 1 to 4 in the winter months, October to March. It is closed on Mondays, on public holidays, and on the second Thursday of June, when the whole staff takes the ferry to Saltholm for the yearly excursion. The reading room alone stays open until 10 in the evening during the four weeks before the school examinations.

3. Membership
Everybody may read in the house without being a member. To borrow something, you need a card. A card costs 12 crowns a year, 5 crowns for people under 26 or over 67, and nothing for children up to the age of 14, for fishermen in service, and for those who work for the library without pay. A new card needs a proof of address that is not older than three months. A lost card is replaced for 3 crowns; the first time it costs nothing. Members who move away may keep their card until it ends.

4. Borrowing
A member may borrow ten books, four maps, two games and one instrument at a time. Books are lent for 28 days, maps for 14 days, games for 21 days and instruments for 90 days. A loan can be renewed twice, unless somebody else waits for the item. Books with a red label stay in the reading room. Books with a blue label, which came by the lighthouse bequest, may leave the house only in their wooden box. The telescope is lent for a single night, only when no storm warning is in force: collect it after 5 in the afternoon, and bring it back before noon.

5. Reservations
Any item can be reserved, in the hall, by telephone or by letter. It then waits at the desk for six days. If you do not collect it, you pay nothing, but the next time you are at the end of the list. At most five items may be reserved by one person. Book clubs may reserve up to fifteen copies of one title if they tell the desk two months before.

6. Fines and damage
A book that comes back late costs 0.10 crowns a day, and at most 4 crowns. A map costs twice as much. The telescope costs 2 crowns an hour after noon. There are no fines for children, but a child with something that is more than 60 days late must come with a grown-up and explain. If you damage a book, you pay for the repair; in most cases the workshop charges 6 crowns. If you lose a book, you pay its price, or bring another copy in the same condition. Water is the most common damage, followed by dogs. Do not dry a wet book on a heater. Bring it wet, in a clean towel, as soon as possible: the workshop can nearly always save it.

7. The reading room
Speak softly. Pencils are allowed, ink is not. Food stays in the hall, where there is a bench for it; tea in a closed cup may be taken in. Each table has a lamp and a socket. Table 7, beside the stove, is for people who are over 70 or who have just come in from the sea. Telephones are silent. Musicians may play the harmonium on Saturday from 3 to 4, when the room is at its emptiest; the hymn book and the book of sea songs are in its bench. In the case of fire, leave by the outer stairs, not by the lift, and meet at the anchor on the quay.

8. The map room
The map room has 6,200 charts, of which 900 are older than the year 1800. It is open by appointment on Wednesday and Friday afternoons. Ask the keeper of maps, Ms Ingrid Vale. Bring clean and dry hands, and no gloves: with gloves you feel the edge of the paper too late. At most three charts may lie on the table at a time. Copies are made while you wait, for 1 crown a sheet up to the size of a newspaper; larger ones take a week and cost 8 crowns. The great chart of the sound, drawn by Peter Lund in 1702, is shown to the public once a year, on the first Sunday of May.

9. The archive
The archive keeps the logbooks of 214 ships, the letters of four harbour masters, and the papers of the rope works that closed in 1951. Ask for a box by its number, in writing, one day before. Boxes come at 11 and at 2. Photographs may be taken without a flash. Papers that name living people are closed for 80 years after they were written, but the people themselves and their children may see them at any time. The archivist, Mr Tomas Brandt, helps with old handwriting on Thursday mornings, and holds a course of five evenings every November, for 20 crowns with a bag of biscuits.

10. The workshop
In the workshop books are bound and repaired. Members may learn it there on Tuesday evenings from 5 to 7, in groups of six. The first evening is free, the next ones cost 4 crowns each with the material. Beginners make a notebook, then a box, then repair a book from the sale. Nobody may use the guillotine without the binder, Ms Oda Fink, in the room. Glue is cooked fresh on the first Tuesday of the month, and the whole house smells of it; people who dislike the smell may like to know that.

11. Children
The story hour is on Saturday at 10, for children from 4 to 8, and lasts forty minutes. In July and August it takes place on the ferry to Saltholm, if there is no wind, and a ticket for the ferry is needed: 2 crowns, and nothing for grown-ups who come along. School classes visit on Wednesday mornings, when the library is closed to others until noon except for the desk. The model ship in the hall may be looked at and not touched, apart from its bell, which is rung for each child that has read ten books.

12. Gifts and the sale
Books are taken as gifts on the first Friday of a month. The library keeps what it lacks and sells the rest, on the last Saturday of September, on the quay, under a tent if it rains. The sale pays for the heating of the reading room: in a good year it brings about 1,900 crowns. Encyclopaedias, damp books and books about tax law are not taken, whoever wrote them.

13. Staff and days of duty
The head librarian is Ms Solveig Aker. She has the desk on Tuesday and Saturday. Mr Jonas Pell has it on Wednesday and Thursday, and takes the money to the bank on Friday. The caretaker, Mr Emil Rask, opens the shutters at 8, reads the barometer, and writes the figure on the board in the hall. If the pressure falls by more than eight in three hours, he rings the desk, the telescope is called back, and the boats of the ferry line are told. Twenty-three people help without pay, an afternoon a week each. To help, write to Ms Aker. She will invite you to a cup of coffee.
`;

// The maximum number of tokens of a reply to a question or an example below: a small model may never stop.
const SHORT_REPLY = 100;
const QUESTIONS = [
  "When is the library open on Saturday?",
  "How long may I borrow a map, and what does it cost if it is late?",
  "Who keeps the maps, and when can I get an appointment?",
  "What should I do with a wet book?",
];
const EXAMPLES = [
  "Explain in three sentences how a lighthouse works.",
  "Write two sentences that invite a friend to a walk by the sea.",
  "List five things to check before a long bicycle tour.",
];
